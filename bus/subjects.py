"""Every subject, bucket, stream and key name; spelled nowhere else."""

import re
import secrets

ENDPOINT = "generate"
ALL = "_all"
"""Stands for every instance of a component in a control subject."""

INSTANCES_BUCKET = "watchkeeper-instances"
STATES_BUCKET = "watchkeeper-states"
EPOCHS_BUCKET = "watchkeeper-epochs"
WEIGHTS_STREAM = "WATCHKEEPER_WEIGHTS"
WEIGHTS_STREAM_SUBJECTS = "watchkeeper.v1.*.*.weights"

_ROOT = "watchkeeper.v1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_NAME_RULE = "must be 1 to 63 letters, digits or hyphens, and begin with a letter or digit"


def check_name(value: str) -> str:
    """Return `value` if it may name a namespace, component, endpoint or instance.

    Raises:
        ValueError: it may not; the text says what a name may be.
    """
    if _NAME.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not a name: it {_NAME_RULE}")
    return value


def default_instance_name(hostname: str) -> str:
    """A new name for an instance on this host; every call gives another one."""
    stem = re.sub(r"[^a-z0-9-]", "-", hostname.lower()).lstrip("-")[:56]
    return f"{stem or 'instance'}-{secrets.token_hex(3)}"


def control(namespace: str, component: str, instance: str, verb: str) -> str:
    """Where a command to `instance` (or to `ALL`) goes."""
    return f"{_component(namespace, component)}.control.{_instance(instance)}.{verb}"


def control_pattern(namespace: str, component: str, instance: str) -> str:
    """What an instance subscribes to, once with its own name and once with `ALL`."""
    return f"{_component(namespace, component)}.control.{_instance(instance)}.*"


def verb_of(subject: str) -> str:
    """The last word of a control subject."""
    return subject.rpartition(".")[2]


def state(namespace: str, component: str, instance: str) -> str:
    return f"{_component(namespace, component)}.state.{check_name(instance)}"


def state_pattern(namespace: str, component: str | None = None) -> str:
    """The state events of all instances of a component, or of all components."""
    part = "*" if component is None else check_name(component)
    return f"{_ROOT}.{check_name(namespace)}.{part}.state.*"


def weights(namespace: str, component: str) -> str:
    """Where a trainer announces a weight version."""
    return f"{_component(namespace, component)}.weights"


def instance_key(namespace: str, component: str, endpoint: str, instance: str) -> str:
    return ".".join(map(check_name, (namespace, component, endpoint, instance)))


def instance_key_pattern(namespace: str, component: str | None = None, endpoint: str = ENDPOINT) -> str:
    part = "*" if component is None else check_name(component)
    return f"{check_name(namespace)}.{part}.{check_name(endpoint)}.*"


def state_key(namespace: str, component: str, instance: str) -> str:
    return ".".join(map(check_name, (namespace, component, instance)))


def state_key_pattern(namespace: str, component: str | None = None) -> str:
    part = "*" if component is None else check_name(component)
    return f"{check_name(namespace)}.{part}.*"


def epoch_key(namespace: str, component: str) -> str:
    return f"{check_name(namespace)}.{check_name(component)}"


def _component(namespace: str, component: str) -> str:
    return f"{_ROOT}.{check_name(namespace)}.{check_name(component)}"


def _instance(value: str) -> str:
    return value if value == ALL else check_name(value)
