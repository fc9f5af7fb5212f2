"""What the documentation says is what the code does, as far as that can be read off it."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from bus import subjects
from bus.codec import Format, decode_command
from bus.messages import Verb, parse_args
from docs import generate
from service.__main__ import cli, run
from service.engine.simulated import CALL_MS
from service.settings import load_client, load_serve
from statemachine.states import State
from statemachine.table import ARROWS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *generate.pages()]


def fenced(page: Path, language: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S))


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of a page, as words."""
    for block in fenced(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- what is generated ---


@pytest.mark.parametrize("page", generate.pages(), ids=by_name)
def test_a_page_is_up_to_date(page: Path) -> None:
    assert page.read_text() == generate.up_to_date(page.read_text()), "run python docs/generate.py"


def test_every_part_is_used_and_every_marker_is_closed() -> None:
    text = "".join(page.read_text() for page in generate.pages())
    assert set(re.findall(r"<!-- generated: ([\w-]+) -->", text)) == set(generate.PARTS)
    assert text.count("<!-- generated:") == text.count("<!-- end -->") == len(generate.MARKER.findall(text))


def test_words_that_are_missing_or_left_over_are_noticed() -> None:
    with pytest.raises(generate.Undocumented, match="brand_new"):
        generate.words("states", [*(s.value for s in State), "brand_new"])
    with pytest.raises(generate.Undocumented, match="paused"):
        generate.words("states", [s.value for s in State if s is not State.PAUSED])


def test_the_diagram_has_every_move_and_no_other() -> None:
    """Read back from the Mermaid text: what leads out of `living` leads out of each state in it."""
    inside, drawn = set(), set()
    for line in generate.diagram().splitlines():
        if match := re.fullmatch(r"( +)(\w+) --> (\w+): .*", line):
            drawn.add((match[2], match[3]))
            if len(match[1]) == 8:
                inside |= {match[2], match[3]}
    expanded = {(s, dest) for source, dest in drawn for s in (inside if source == "living" else {source})}
    assert expanded == {
        (arrow.source.value, arrow.dest.value)
        for arrow in ARROWS
        if arrow.source is not arrow.dest and arrow.event.__name__ != generate.OBSERVED
    }


# --- what is written by hand ---


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.is_file(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_command_line_takes_the_commands(page: Path) -> None:
    for words in commands(page):
        if Path(words[0]).name != "watchkeeper":
            continue
        assert words[1] in cli.commands, words
        command = cli.commands[words[1]]
        with click.Context(cli, info_name="watchkeeper") as parent:
            command.make_context(words[1], words[2:], parent=parent)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_what_is_sent_with_the_nats_command_is_a_command(page: Path) -> None:
    for words in commands(page):
        if words[:2] != ["nats", "request"]:
            continue
        subject, body = words[2:]
        verb = Verb(subjects.verb_of(subject))
        assert subject == subjects.control("default", "backend", "one", verb)
        command, form = decode_command(body.encode())
        assert form is Format.JSON
        parse_args(verb, command.args)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_python_is_python(page: Path) -> None:
    for block in fenced(page, "python"):
        ast.parse(block)


def test_the_trainer_is_short() -> None:
    [trainer] = [block for block in fenced(ROOT / "README.md", "python") if block.startswith("# a trainer\n")]
    assert len([line for line in trainer.splitlines()[1:] if line]) <= 20


def test_the_example_file_is_read_by_all_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/configuration.md"
    [text] = fenced(page, "toml")
    file = tmp_path / "watchkeeper.toml"
    file.write_text(text)
    loaded = load_serve("any", environ={}, flags={"engine": "sim"}, config=str(file))
    assert loaded.component == load_client(environ={}, config=str(file)).component == "policy"
    [(_, *arguments)] = commands(page)
    assert run([str(file) if word == file.name else word for word in arguments]) == 0
    assert f"prints `{capsys.readouterr().out.strip()}`" in page.read_text()


def test_a_pod_is_given_the_time_that_its_shutdown_needs(capsys: pytest.CaptureFixture[str]) -> None:
    [text] = fenced(ROOT / "docs/operations.md", "yaml")
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert run([*container["args"], "--engine", "sim", "--print-termination-grace"]) == 0
    assert int(capsys.readouterr().out) == pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for kind in ("liveness", "readiness"):
        assert container[f"{kind}Probe"]["grpc"] == {"port": ports["grpc"], "service": kind}


def test_the_example_of_the_simulated_engine_names_calls_that_exist() -> None:
    text = (ROOT / "docs/engine.md").read_text()
    given = re.findall(r"--call-ms ([a-z]\S+)", text)
    named = {part.partition("=")[0] for item in given for part in item.split(",")}
    assert named and named <= set(CALL_MS)
