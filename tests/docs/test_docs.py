"""The documentation: its examples run, its links lead somewhere, its generated pages are those of this code."""

from __future__ import annotations

import ast
import builtins
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
from jobs import HANGS_S, run_job

from kvmpi import errors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


#: Importing torch takes longer than all examples: each page gets a copy of a process that has them.
RUN_PAGES = """
import json, os, sys
import torch

for name, texts in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        os.makedirs(f"in {name}")
        os.chdir(f"in {name}")
        os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
        for text in texts:
            exec(text, {"__name__": "__main__"})
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{name} {status}", "w"):
        pass
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A folder with a file ``PAGE STATUS`` for each page whose examples have been run, and ``in PAGE/stderr``."""
    folder = tmp_path_factory.mktemp("pages")
    texts = json.dumps([(page.name, blocks(page)) for page in PAGES if blocks(page)])
    subprocess.run([sys.executable, "-c", RUN_PAGES], cwd=folder, input=texts, text=True, timeout=400, check=True)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_run(page, ended):
    assert (ended / f"{page.name} 0").exists(), (ended / f"in {page.name}" / "stderr").read_text()


def test_examples_of_algorithms_hold_among_several_workers(tmp_path):
    """What is said of one worker alone is not so where others push to the same key."""
    program = tmp_path / "algorithms.py"
    program.write_text("\n".join(["import os", f"os.chdir({str(tmp_path)!r})", *blocks(ROOT / "docs/algorithms.md")]))
    done = run_job("-n 2 -c 2 -s 1", program)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples():
    assert sum(len(blocks(page)) for page in PAGES) >= 5


def test_generated_pages_are_current():
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_code_in_docstrings_is_code_on_the_page():
    page = (ROOT / "docs" / "api.md").read_text()
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))*)+", page, re.MULTILINE)
    assert len(found) >= 5
    for text in found:
        ast.parse(textwrap.dedent(text))
    assert "\n::\n" not in page


@mock.patch.dict(os.environ)  # kvmpi.torch.c10d says there where the processes of a job meet
def test_what_the_reference_shows_with_parentheses_is_called():
    headings = re.findall(r"^####? ((?:\w+\.)+)(\w+)(.*)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(headings) == len({of + name for of, name, _ in headings}) > 100
    owners = {"kv": "kvmpi.KVStore", "work": "kvmpi.Work", "hvd": "kvmpi.horovod"}
    for of, name, arguments in headings:
        owner = of.removesuffix(".")
        owner = owners.get(owner, owner if owner.startswith("kvmpi") else f"kvmpi.torch.{owner}")
        thing = pkgutil.resolve_name(f"{owner}.{name}")
        assert arguments.startswith("(") != isinstance(thing, property), of + name
        assert "<" not in arguments, f"{of}{name}{arguments}"


def test_links_lead_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def messages() -> str:
    """The constant parts of every text in the library and the launchers; what is filled in is left out."""
    found = []
    for path in [*(ROOT / "kvmpi").rglob("*.py"), *(ROOT / "launchers").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


def is_said(part: str, known: str, pieces: int = 3) -> bool:
    """Whether ``part`` is in the code, or put together from pieces there that are not too short to mean anything."""
    if part in known:
        return True
    for cut in range(5, len(part) - 4) if pieces > 1 else ():
        if part[:cut] not in known:  # nor is what is longer
            return False
        if is_said(part[cut:], known, pieces - 1):
            return True
    return False


def quotes(page: Path) -> list[str]:
    """Lines of blocks that quote what kvmpi prints."""
    text = "\n".join(re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    return [line for line in text.splitlines() if line]


def test_quoted_messages_are_those_of_the_code():
    known = messages()
    lines = quotes(ROOT / "docs" / "troubleshooting.md")
    assert len(lines) > 30
    for line in lines:
        kind, said = re.fullmatch(r"(?:kvmpi run: |(\w+(?:Error|Warning)): )?(.*)", line).groups()
        assert kind is None or kind in errors.BY_NAME or hasattr(builtins, kind), line
        parts = [part.strip() for part in said.split("...")]
        assert max(map(len, parts)) >= 12, f"too little of it is quoted: {line}"
        for part in parts:
            assert len(part) < 4 or is_said(part, known), f"{line}\nnobody says: {part!r}"
    assert not is_said("no server has ever said such a thing", known)
