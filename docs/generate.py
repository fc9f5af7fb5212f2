"""Writes those parts of the documentation that the code knows best.

    python docs/generate.py           brings docs/*.md up to date
    python docs/generate.py --check   only says which are not; exit 1 if any

What stands between `<!-- generated: NAME -->` and `<!-- end -->` in a page comes from the function
`NAME` in `PARTS`. The words in the tables are in `words.toml`: a field, code, state or option that has
none there, or words for something that is gone, is an error.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bus import announce, codec, discovery, messages, subjects
from bus.messages import ARGS, ErrorCode, Verb
from service import control, ending, options, settings
from service.engine import simulated
from service.engine.rpc import control_pb2
from service.front_desk import FrontDesk
from service.http_verbs import HttpVerbs
from service.metrics import Metrics
from service.router.metrics import Metrics as RouterMetrics
from service.router.settings import ROUTER_OPTIONS
from statemachine import health, table
from statemachine.facts import Situation
from statemachine.states import Phase, State

DOCS = Path(__file__).parent
WORDS: dict[str, Any] = tomllib.loads((DOCS / "words.toml").read_text())
MARKER = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Undocumented(Exception):
    """words.toml and the code do not name the same things."""


# --- Markdown -----------------------------------------------------------------------------------


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(value: object) -> str:
    return f"`{value}`"


def words(section: str, names: Iterable[str]) -> dict[str, Any]:
    """The words of a section of words.toml for exactly these names, in their order.

    A text for each name, or a table of texts.
    """
    found: Any = WORDS
    for key in section.split("."):
        found = found[key]
    names = list(names)
    if difference := set(names) ^ set(found):
        raise Undocumented(f"words.toml [{section}] lacks, or need not have, {', '.join(sorted(difference))}")
    return {name: found[name] for name in names}


def explained(head: Sequence[str], section: str, names: Iterable[str]) -> str:
    """A table of names and their meaning."""
    return rows(head, ((code(name), text) for name, text in words(section, names).items()))


# --- states -------------------------------------------------------------------------------------


def states() -> str:
    return explained(("state", "meaning"), "states", (s.value for s in State))


def phases() -> str:
    return explained(("phase", "meaning"), "phases", (p.value for p in Phase))


def _moves() -> dict[tuple[State, State], list[type]]:
    """The events that may lead from one state to another one."""
    found: dict[tuple[State, State], list[type]] = {}
    for arrow in table.ARROWS:
        if arrow.source is not arrow.dest:
            found.setdefault((arrow.source, arrow.dest), []).append(arrow.event)
    return found


def _labels() -> dict[str, str]:
    events = {event.__name__ for named in _moves().values() for event in named}
    return {name: entry["label"] for name, entry in words("events", sorted(events)).items()}


OBSERVED = "Observed"
"""The event that has a table of its own: in the diagram its arrows would hide the others."""


def diagram() -> str:
    """Every move but those of `Observed`. What all living states have in common is drawn once."""
    labels = _labels()
    moves = {
        pair: ", ".join(labels[e.__name__] for e in events if e.__name__ != OBSERVED)
        for pair, events in _moves().items()
    }
    moves = {pair: label for pair, label in moves.items() if label}
    living = list(table.LIVING)
    common: dict[State, str] = {}
    for dest in (s for s in State if s not in living):
        shared = {moves.get((source, dest)) for source in living}
        if len(shared) == 1 and (label := shared.pop()):
            common[dest] = label

    inner, outer = [], []
    for (source, dest), label in moves.items():
        line = f"{source.value} --> {dest.value}: {label}"
        if source in living and dest in living:
            inner.append(line)
        elif source not in living or dest not in common:
            outer.append(line)
    lines = [
        "stateDiagram-v2",
        "    direction LR",
        f"    [*] --> {State.STARTING.value}",
        "    state living {",
        *(f"        {line}" for line in inner),
        "    }",
        *(f"    living --> {dest.value}: {label}" for dest, label in common.items()),
        *(f"    {line}" for line in outer),
        f"    {State.STOPPED.value} --> [*]",
    ]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def events() -> str:
    labels = _labels()
    entries: Mapping[str, Any] = WORDS["events"]
    return rows(
        ("in the diagram", "event", "meaning"),
        ((labels[name], code(name), entries[name]["meaning"]) for name in _in_order_of_arrows(labels)),
    )


def _in_order_of_arrows(names: Iterable[str]) -> list[str]:
    order = list(dict.fromkeys(arrow.event.__name__ for arrow in table.ARROWS))
    return sorted(names, key=order.index)


def observed() -> str:
    """Where a state may turn out to have changed although nobody asked us."""
    found: dict[State, list[str]] = {}
    for (source, dest), named in _moves().items():
        if any(event.__name__ == OBSERVED for event in named):
            found.setdefault(source, []).append(code(dest.value))
    return rows(("from", "to"), ((code(s.value), ", ".join(found[s])) for s in State if s in found))


def verbs() -> str:
    """The verb table, with the numbers of the notes that words.toml attaches to its cells."""
    notes = _notes_by_cell()
    body = []
    for situation in Situation:
        cells = []
        for verb in table.Verb:
            cell = table.VERBS[situation, verb]
            text = _short(cell) if cell.refuses else cell.value
            numbers = notes.get((situation, verb), ())
            cells.append(text + "".join(f" ({number})" for number in numbers))
        body.append([situation.value, *cells])
    return rows(["", *(verb.value for verb in table.Verb)], body)


def refusals() -> str:
    """What stands for which code in the verb table."""
    return ", ".join(f"{_short(cell)} {code(cell.value)}" for cell in table.Cell if cell.refuses) + "\n"


def _short(cell: table.Cell) -> str:
    """The initials of a refusal's code."""
    return "".join(word[0] for word in cell.value.split("_")).upper()


def notes() -> str:
    _notes_by_cell()
    return "".join(f"{n}. {note['text']}\n" for n, note in enumerate(WORDS["verb-notes"], start=1))


def _notes_by_cell() -> dict[tuple[Situation, table.Verb], list[int]]:
    found: dict[tuple[Situation, table.Verb], list[int]] = {}
    for number, note in enumerate(WORDS["verb-notes"], start=1):
        for where in note["at"]:
            row, _, column = where.rpartition(" / ")
            found.setdefault((Situation(row), table.Verb(column)), []).append(number)
    return found


def health_table() -> str:
    def line(name: str, state: State, settled: bool, engine_failed: bool) -> list[str]:
        found = health.statuses(state, settled, engine_failed)
        return [name, *("SERVING" if found[each] else "NOT_SERVING" for each in health.NAMES)]

    body = []
    for state in (s for s in State if s is not State.STOPPED):  # by then the listener closes
        failed = state is State.FAILED
        if state in table.LIVING:
            settled = line(f"`{state.value}`, settled", state, True, failed)
            unsettled = line(f"`{state.value}`, not settled", state, False, failed)
            if settled[1:] == unsettled[1:]:
                body.append(line(code(state.value), state, True, failed))
            else:
                body += [settled, unsettled]
        else:
            body.append(line(code(state.value), state, True, failed))
            if state is State.SHUTTING_DOWN:
                body.append(line(f"`{state.value}` after a failure", state, True, True))
    return rows(("state", *(code(name or '""') for name in health.NAMES)), body)


# --- protocol -----------------------------------------------------------------------------------


def subject_table() -> str:
    place = {key: f"X{key}X" for key in ("namespace", "component", "instance", "verb", "endpoint")}

    def shown(text: str) -> str:
        for key, value in place.items():
            text = text.replace(value, "{" + key + "}")
        return code(text)

    ns, component, instance = place["namespace"], place["component"], place["instance"]
    found = {
        "control": shown(subjects.control(ns, component, instance, place["verb"])),
        "control-all": shown(subjects.control(ns, component, subjects.ALL, place["verb"])),
        "state": shown(subjects.state(ns, component, instance)),
        "weights": shown(subjects.weights(ns, component)),
    }
    said = words("subjects", found)
    return rows(("subject", "what travels there"), ((found[key], said[key]) for key in found))


def buckets() -> str:
    ns, component, instance, endpoint = "XnX", "XcX", "XiX", "XeX"

    def shown(key: str) -> str:
        for text, name in ((ns, "namespace"), (component, "component"), (instance, "instance")):
            key = key.replace(text, "{" + name + "}")
        return code(key.replace(endpoint, "{endpoint}"))

    found = {
        subjects.INSTANCES_BUCKET: shown(subjects.instance_key(ns, component, endpoint, instance)),
        subjects.STATES_BUCKET: shown(subjects.state_key(ns, component, instance)),
        subjects.EPOCHS_BUCKET: shown(subjects.epoch_key(ns, component)),
    }
    said = words("buckets", found)
    return rows(("bucket", "key", "value"), ((code(b), key, said[b]) for b, key in found.items()))


def command_fields() -> str:
    return _fields(messages.Command, "command", required="–")


def verb_args() -> str:
    """Verb, args with type and default, and what comes back."""
    results = words("results", (v.value for v in Verb))
    body: list[list[str]] = []
    for verb in Verb:
        fields = _inspect(ARGS[verb])
        said = words(f"args.{verb.value}", (f.encode_name for f in fields)) if fields else {}
        args = [[code(f.encode_name), _type(f.type), _default(f), said[f.encode_name]] for f in fields]
        for line in args or [["–", "", "", ""]]:
            named = body and body[-1][0] == code(verb.value)
            body.append([code(verb.value), *line, "" if named else results[verb.value]])
    return rows(("verb", "argument", "type", "default", "meaning", "`result` when ok"), body)


def manifest_fields() -> str:
    return _fields(messages.Manifest, "manifest")


def reply_fields() -> str:
    return _fields(messages.Reply, "reply", defaults=False)


def announcement_fields() -> str:
    return _fields(messages.Announcement, "announcement")


def routes() -> str:
    found = [f"{route.method} {route.path}" for route in HttpVerbs(cast(FrontDesk, None)).routes()]
    return explained(("route", "does"), "routes", found)


def rpcs() -> str:
    methods = control_pb2.DESCRIPTOR.services_by_name["Control"].methods
    return explained(("RPC", "does"), "rpcs", (method.name for method in methods))


def error_fields() -> str:
    return _fields(messages.ErrorBody, "error", defaults=False)


def snapshot_fields() -> str:
    return _fields(messages.Snapshot, "snapshot", nested=True, defaults=False)


def entry_fields() -> str:
    return _fields(messages.InstanceEntry, "entry", nested=True, defaults=False)


def errors() -> str:
    said = words("errors", (c.value for c in ErrorCode))
    return rows(
        ("code", "meaning", "retryable", "HTTP", "gRPC"),
        (
            (code(c.value), said[c.value], "yes" if c.retryable else "no", str(c.http_status), c.grpc_status)
            for c in ErrorCode
        ),
    )


def limits() -> str:
    found = {
        "bytes": f"{codec.MAX_BYTES:,}",
        "depth": str(codec.MAX_DEPTH),
        "items": f"{codec.MAX_ITEMS:,}",
        "waiting": str(control.MAX_WAITING),
        "remembered": f"{control.REMEMBER_MAX:,}",
        "remembered-s": f"{control.REMEMBER_S:g} s",
        "ttl-s": f"{discovery.TTL_S:g} s",
        "renew-s": f"{discovery.RENEW_S:g} s",
        "marker-s": f"{discovery.MARKER_TTL_S:g} s",
        "delete-s": f"{discovery.DELETE_TIMEOUT_S:g} s",
        "grace-s": f"{discovery.GRACE_S:g} s",
        "announcements": str(announce.KEPT),
    }
    said = words("limits", found)
    return rows(("limit", "value"), ((said[key], value) for key, value in found.items()))


def _inspect(struct: type[msgspec.Struct]) -> Sequence[msgspec.inspect.Field]:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def _fields(
    struct: type[msgspec.Struct],
    section: str,
    nested: bool = False,
    defaults: bool = True,
    required: str = "required",
) -> str:
    found = list(_flat(_inspect(struct)) if nested else ((f.encode_name, f) for f in _inspect(struct)))
    said = words(section, (name for name, _ in found))
    if defaults:
        body = [[code(n), _type(f.type), _default(f, required), said[n]] for n, f in found]
        return rows(("field", "type", "default", "meaning"), body)
    return rows(("field", "type", "meaning"), ([code(n), _type(f.type), said[n]] for n, f in found))


def _flat(
    fields: Sequence[msgspec.inspect.Field], prefix: str = ""
) -> Iterator[tuple[str, msgspec.inspect.Field]]:
    """Fields with those of nested structs behind them, by dotted name."""
    for field in fields:
        name = prefix + field.encode_name
        yield name, field
        for part in _parts(field.type):
            if isinstance(part, msgspec.inspect.StructType):
                yield from _flat(part.fields, f"{name}.")


def _parts(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return tuple(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _type(kind: msgspec.inspect.Type) -> str:
    """A type in the words of a reader who does not know Python."""
    i = msgspec.inspect
    match kind:
        case i.UnionType(types=types):
            some = [_type(t) for t in types if not isinstance(t, i.NoneType)]
            optional = any(isinstance(t, i.NoneType) for t in types)
            return " or ".join(some) + (" or null" if optional else "")
        case i.BoolType():
            return "true/false"
        case i.IntType(ge=ge, le=le):
            return "integer" + _range(ge, le)
        case i.FloatType(gt=gt, ge=ge):
            low = f" (above {gt:g})" if gt is not None else f" (at least {ge:g})" if ge is not None else ""
            return f"number{low}"
        case i.StrType(pattern=str()):
            return "text (64 hex digits)"
        case i.StrType(min_length=least) if least:
            return "text (not empty)"
        case i.StrType():
            return "text"
        case i.LiteralType(values=values):
            return " / ".join(code(v) for v in values)
        case i.ListType(item_type=item, min_length=least) | i.VarTupleType(item_type=item, min_length=least):
            return f"list{' (not empty)' if least else ''} of {_type(item)}"
        case i.DictType() | i.StructType():
            return "map"
        case i.AnyType():
            return "anything"
    raise Undocumented(f"no words for the type {kind}")


def _range(ge: int | None, le: int | None) -> str:
    huge = 2**31
    if ge is None or ge <= -huge:
        return ""
    return f" (at least {ge})" if le is None or le >= huge else f" ({ge} to {le})"


def _default(field: msgspec.inspect.Field, required: str = "required") -> str:
    if field.required:
        return required
    if field.default is not msgspec.NODEFAULT:
        return "–" if field.default is None else code(msgspec.json.encode(field.default).decode())
    return code(msgspec.json.encode(field.default_factory()).decode())


# --- configuration and operations ------------------------------------------------------------------


def serve_options() -> str:
    return _options(settings.SERVE_OPTIONS)


def client_options() -> str:
    return _options(settings.CLIENT_OPTIONS)


def _options(listed: Sequence[options.Option]) -> str:
    def spelled(option: options.Option) -> str:
        if option.kind is options.BOOLEAN:
            return f"{code(option.flag)}, {code(f'--no-{option.flag[2:]}')}"
        return code(f"{option.flag} {option.kind.metavar}")

    return rows(
        ("option", "variable", "default", "meaning"),
        ((spelled(o), code(o.variable), o.shown_default or "–", o.help) for o in listed),
    )


def stages() -> str:
    said = words("stages", (name for name, *_ in ending.STAGES))
    return rows(
        ("stage", "what happens", "its limit", "second signal"),
        (
            (code(name), said[name]["what"], said[name]["limit"], "skips it" if waits else "–")
            for name, _, _, waits, _ in ending.STAGES
        ),
    )


def router_options() -> str:
    return _options(ROUTER_OPTIONS)


def metrics() -> str:
    return _metrics(Metrics().text())


def router_metrics() -> str:
    return _metrics(RouterMetrics(lambda: ()).text())


def _metrics(text: bytes) -> str:
    families = text_string_to_metric_families(text.decode())
    shown = [f for f in families if not f.name.endswith("_created")]
    return rows(
        ("metric", "type", "meaning"),
        ((code(f.name + ("_total" if f.type == "counter" else "")), f.type, f.documentation) for f in shown),
    )


def simulated_calls() -> str:
    said = words("simulated-calls", simulated.CALL_MS)
    return rows(
        ("call", "takes, in ms", "made by"),
        ((code(name), f"{ms:g}", said[name]) for name, ms in simulated.CALL_MS.items()),
    )


PARTS: dict[str, Callable[[], str]] = {
    "states": states,
    "phases": phases,
    "diagram": diagram,
    "events": events,
    "observed": observed,
    "verbs": verbs,
    "refusals": refusals,
    "verb-notes": notes,
    "health": health_table,
    "subjects": subject_table,
    "buckets": buckets,
    "command-fields": command_fields,
    "verb-args": verb_args,
    "manifest-fields": manifest_fields,
    "reply-fields": reply_fields,
    "announcement-fields": announcement_fields,
    "routes": routes,
    "rpcs": rpcs,
    "error-fields": error_fields,
    "errors": errors,
    "snapshot-fields": snapshot_fields,
    "entry-fields": entry_fields,
    "limits": limits,
    "serve-options": serve_options,
    "client-options": client_options,
    "stages": stages,
    "metrics": metrics,
    "router-options": router_options,
    "router-metrics": router_metrics,
    "simulated-calls": simulated_calls,
}


def up_to_date(text: str) -> str:
    """A page with its generated parts as the code has them now.

    Raises:
        Undocumented: words are missing, or there is no such part.
    """

    def replaced(match: re.Match[str]) -> str:
        part = PARTS.get(match["name"])
        if part is None:
            raise Undocumented(f"no part is called {match['name']}")
        return f"{match[1]}\n{part()}\n{match[3]}"

    return MARKER.sub(replaced, text)


def pages() -> list[Path]:
    return sorted(DOCS.glob("*.md"))


def main(arguments: Sequence[str]) -> int:
    stale = 0
    for page in pages():
        text = page.read_text()
        fresh = up_to_date(text)
        if fresh == text:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"{page.name} is not up to date: run python docs/generate.py")
        else:
            page.write_text(fresh)
            print(f"{page.name} written")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
