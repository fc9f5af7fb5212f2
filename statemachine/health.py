"""State -> status of every health name."""

from statemachine.states import State

LIVENESS = "liveness"
READINESS = "readiness"
LEGACY = ("vllm.Inference", "vllm.Control", "")
"""Names that vLLM's own health service has; a pause leaves them alone unless asked otherwise."""

NAMES = (LIVENESS, READINESS, *LEGACY)

_DOWN = (State.STARTING, State.FAILED, State.SHUTTING_DOWN, State.STOPPED)


def statuses(
    state: State, settled: bool, engine_failed: bool, withdraw_on_pause: frozenset[str] = frozenset()
) -> dict[str, bool]:
    """The status of each name; True is SERVING.

    Args:
        engine_failed: the engine was lost in this life, whatever the state shows now.
        withdraw_on_pause: legacy names that follow readiness.
    """
    ready = state is State.SERVING and settled
    legacy = state not in _DOWN
    return {
        LIVENESS: not engine_failed and state is not State.FAILED,
        READINESS: ready,
        **{name: legacy and (ready or name not in withdraw_on_pause) for name in LEGACY},
    }
