"""Every block on the documentation site runs, page by page and in order, in a folder of its own and at a tiny size; or it says
what it needs. The first page is a reader's whole path: a trained model, a figure of an analysis, a pruned model. A block whose
title is a file's path is that file.

`pnn` is called in this process and `accelerate launch` in a forked one (importing torch again for each command would take most
of the time); all else by bash.
"""

from __future__ import annotations

import html
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import yaml
from accelerate.commands import launch

from pnn.studies.registry import analysis_names

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>\w+) -->\n)?"
    r'```(?P<language>\w*)(?: title="(?P<file>[^"]+)")?[^\n]*\n(?P<code>.*?)^```$',
    re.M | re.S,
)
NEEDS = {"browser", "files", "gpu", "hub", "install", "machines", "package", "time"}
SHOWN = {"text"}  # languages that are there to be read
START = "docs/index.md"
# what an option or an import needs beyond the core; the dev extra has it
OPTIONAL = {"--shots": "lm_eval", "--onnx": "onnx", "peft": "peft"}
SLOW = {START, "docs/ablations.md", "docs/howto/many_gpus.md", "docs/howto/decoders.md", "docs/howto/your_text.md"}
CORPUS = ["data.synthetic_paragraphs=300", "data.validation_sequences=30", "training.tensorboard=false"]
FEW = ["--sequences", "10"]
SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 100}
TINY = {  # what the tests add to a command
    "quickstart": [word for key in [*CORPUS, "training.max_steps=4"] for word in ("--set", key)],
    "train gpt2_tiny --set": ["--max-steps", "16", *(word for key in CORPUS for word in ("--set", key))],  # ten changes
    "train": ["--max-steps", "3", *(word for key in CORPUS for word in ("--set", key))],
    "analyze": FEW,
    "evidence": FEW,
    "compare": FEW,
    "calibrate runs/quickstart/pnn --lose": ["--data", "synthetic"],  # what a tiny run holds out is too short
    "bench": ["--seconds", "0.05", *(word for key in CORPUS for word in ("--set", key))],
    "plasticity cycle": ["--learn-steps", "2", "--validation-rows", "4"],
    "shrink": ["--learn-steps", "4", "--validation-rows", "8", "--score-rows", "8"],
    "finetune": ["--epochs", "1"],
}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    needs: str | None
    file: str | None


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(m["language"], m["code"], m["needs"], m["file"]) for m in FENCE.finditer(text)]


def site_pages() -> list[str]:
    """In the order of the site's navigation."""

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        parts = [part for value in entry.values() for part in (value if isinstance(value, list) else [value])]
        return [leaf for part in parts for leaf in leaves(part)]

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    places = [place for entry in navigation for place in leaves(entry)]
    return [f"docs/{place}" if (ROOT / "docs" / place).exists() else place for place in places]


def runnable(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.needs is None and block.language not in SHOWN]


EXAMPLES = ["refine", "reorganise", "rewrite"]
PAGES = [page for page in site_pages() if runnable(page)]


def lines_of(code: str) -> list[str]:
    """Commands of a shell block, without comments; a backslash goes on with the next line."""
    lines = [line.strip() for line in code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def call(words: list[str]) -> None:
    from pnn.cli import main

    sys.argv = ["pnn", *words]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    assert code == 0, f"pnn {shlex.join(words)}: exit code {code}"


def tiny(words: list[str]) -> list[str]:
    names = [name for name in TINY if words[: len(name.split())] == name.split()]
    return [*words, *(TINY[names[0]] if names else [])]


def missing(words: list[str]) -> list[str]:
    packages = [package for option, package in OPTIONAL.items() if option in words and find_spec(package) is None]
    return packages + [word for word in words if word.startswith("models/") and not (ROOT / word).exists()]


def run_line(line: str, folder: Path, start_pnn) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "pnn":
        expanded = []
        for word in words[1:]:
            # what a shell would do: a bare word is a pattern, a quoted one and a setting are not
            found = sorted(str(path) for path in folder.glob(word)) if "*" in word and f" {word}" in line else []
            expanded += found or [word]
        call(tiny(expanded))
        return
    if words[0] == "pytest":
        run_tests(folder / words[1])
        return
    if words[:2] == ["accelerate", "launch"]:
        launcher = start_pnn("--main_process_port", "0", *words[2:], *TINY["train"], script=Path(launch.__file__))
        assert launcher.wait() == 0, launcher.output()[-2000:]
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"


def run_tests(path: Path) -> None:
    """In this process, which knows the page's files."""
    tests = [value for name, value in runpy.run_path(str(path)).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def add_file(file: str, code: str, folder: Path) -> None:
    """A file that a page adds to a clone. The package, which is not the clone's, looks for modules there too."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    if file.startswith("src/"):
        import_module(package_of(file)).__path__.append(str(path.parent))


def forget_file(file: str, folder: Path) -> None:
    if file.startswith("src/"):
        package, name = import_module(package_of(file)), Path(file).stem
        package.__path__.remove(str((folder / file).parent))
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


def package_of(file: str) -> str:
    return ".".join(Path(file).parent.parts[1:])


def by_parameters(models: dict, length: int) -> dict[str, float]:
    """A clock that nothing else on the machine slows."""
    return {name: float(model.num_parameters()) for name, model in models.items()}


def run_page(page: str, folder: Path, start_pnn) -> None:
    names: dict = {"__name__": "page"}
    left_out = []
    for block in runnable(page):
        if block.file is not None:
            add_file(block.file, block.code, folder)
        elif block.language == "python":
            without = missing(block.code.split())
            left_out += without
            if not without:
                exec(compile(block.code, page, "exec"), names)
        else:
            for line in lines_of(block.code):
                without = missing(shlex.split(line, comments=True)) if line.startswith("pnn ") else []
                left_out += without
                if not without:
                    run_line(line, folder, start_pnn)
    if left_out:
        pytest.skip(f"all of it ran but what needs {', '.join(left_out)}, which the dev extra or a clone has")


@pytest.fixture
def here(tmp_path, monkeypatch, forked_jobs, fork_server, small_product):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHON_EXEC", str(fork_server.python()))  # what launchers start
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr("pnn.evaluation.choosing.SECONDS", 0.0)
    monkeypatch.setattr("pnn.evaluation.choosing.TIMED_TOKENS", 256)
    monkeypatch.setattr("pnn.bench.latency.BERT_BASE", SMALL_BERT)
    for folder in ("launch", "models"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    return tmp_path


@pytest.fixture(scope="session")
def quickstart_runs(tmp_path_factory) -> Path:
    """The two models that other pages start from, as `pnn quickstart` leaves them, trained in this process."""
    folder, before, argv = tmp_path_factory.mktemp("quickstart"), os.getcwd(), sys.argv
    os.chdir(folder)
    try:
        for name in ("pnn", "bert"):
            call(tiny(["train", f"quickstart_{name}", "--output", f"runs/quickstart/{name}"]))
    finally:
        os.chdir(before)
        sys.argv = argv
    return folder


def test_every_block_is_run_or_says_what_it_needs():
    for page in site_pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        found = blocks(page)
        assert len(re.findall(r"^\s*```", text, re.M)) == 2 * len(found), f"{page}: a block that is not seen here"
        assert len(re.findall("^<!-- needs:", text, re.M)) == sum(block.needs is not None for block in found), page
        assert not re.search(r"(?<=\n\n)    \S", FENCE.sub("", text)), f"{page}: an indented block; fence it"
        for block in found:
            assert block.needs in NEEDS | {None}, page
            assert block.language in SHOWN | {"bash", "python"}, f"{page}: {block}"
        assert page in PAGES or not runnable(page)
    assert PAGES[0] == START


def test_every_page_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {str(path.relative_to(ROOT)) for path in ROOT.glob("results/*/README.md")} <= set(site_pages())


@pytest.mark.slow
def test_the_first_page_is_the_whole_path(here, start_pnn):
    run_page(START, here, start_pnn)
    assert (here / "runs/quickstart/report.html").stat().st_size > 10_000
    assert (here / "runs/quickstart/pnn/figures/convergence.png").read_bytes()[:4] == b"\x89PNG"
    whole, smaller = (
        sum(file.stat().st_size for file in (here / folder).glob("model.safetensors"))
        for folder in ("runs/quickstart/pnn/checkpoints/best", "runs/smaller")
    )
    assert 0 < smaller < whole


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PAGES if page != START]
)
def test_a_page_runs(page, here, quickstart_runs, start_pnn, undrawn):
    from pnn.nn.updates import UPDATES
    from pnn.plasticity.architectures import ARCHITECTURES

    if "runs/quickstart/" in "".join(block.code for block in runnable(page)):
        shutil.copytree(quickstart_runs, here, dirs_exist_ok=True, symlinks=True)
    try:
        # a page adds one; and how fast a small model is on a busy machine is nobody's promise
        with patch.dict(ARCHITECTURES), patch.dict(UPDATES), patch("pnn.plasticity.budget.reading_times", by_parameters):
            run_page(page, here, start_pnn)
    finally:
        for file in (block.file for block in runnable(page) if block.file is not None):
            forget_file(file, here)
    if page == "docs/howto/analysis.md":  # an analysis was added from end to end, and is gone again
        run = here / "runs/quickstart/pnn"
        found = json.loads((run / "analysis/confidence.json").read_text())["findings"]["surer_at_every_step"]
        assert (run / "figures/confidence.png").exists()
        row = next(
            row for row in (run / "report.html").read_text().split("<tr>") if "predictions grow surer at every step" in row
        )
        assert f">{found['verdict']}</span>" in row
        assert "confidence" not in analysis_names()
    if page == "docs/howto/many_gpus.md":  # two processes were promised
        assert json.loads((here / "runs/two/environment.json").read_text())["hardware"]["processes"] == 2
        rows = [json.loads(line) for line in (here / "runs/two/metrics.jsonl").read_text().splitlines()]
        assert max(row["step"] for row in rows) == 3
        assert (here / "runs/two/evaluation.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, here, capsys):
    """With fewer updates than by itself."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="example")["main"](updates=5)
    assert capsys.readouterr().out


def test_there_is_an_example_for_each_idea():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "images"}  # tests/images has a folder for it


@pytest.fixture(scope="module")
def hooks() -> dict:
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    return runpy.run_path(str(ROOT / "docs" / "hooks.py"))


def test_a_page_that_is_taken_in_brings_its_pictures_along(hooks):
    there = hooks["taken_in"](["results.md"])
    assert "results/halting/classifier/README.md" in there  # which docs/results.md links to
    for page in (path for path in there if path.endswith(".md")):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            place = os.path.normpath(os.path.join(os.path.dirname(page), picture))
            assert place in there or not (ROOT / place).exists(), f"{page}: {picture}"


def test_a_picture_is_a_link_to_itself_over_its_caption(hooks):
    picture = '<img alt="heads" src="../images/heads.svg" />'
    drawn = hooks["on_page_content"](f"<p>{picture}\n<em>Heads by layer.</em></p>")
    assert drawn == f'<figure><a href="../images/heads.svg">{picture}</a><figcaption>Heads by layer.</figcaption></figure>'


def test_a_page_without_headings_has_its_bold_beginnings_as_contents(hooks):
    toc = pytest.importorskip("mkdocs.structure.toc")
    page = SimpleNamespace(toc=toc.TableOfContents([toc.AnchorLink("Decisions", "decisions", 1)]))
    drawn = hooks["on_page_content"]("".join(f"<p><strong>Why <code>{n}</code>?</strong> So.</p>" for n in "abcd"), page=page)
    assert drawn.startswith('<p id="why-a"><strong>Why')
    assert [(link.title, link.id) for link in next(iter(page.toc)).children][:2] == [("Why a?", "why-a"), ("Why b?", "why-b")]


def test_lines_do_not_end_inside_an_option_nor_before_a_per_cent_sign(hooks):
    command = '<div class="language-bash highlight"><pre><code>pnn train x --max-steps 3 % 2</code></pre></div>'
    drawn = hooks["on_page_content"](f'<p>95 % of it</p><a href="at-2e-3">2e-3</a>{command}')
    assert drawn.startswith('<p>95\u00a0% of it</p><a href="at-2e-3"><span class="option">2e-3</span></a>')
    assert 'x <span class="option">--max-steps</span> 3 % 2' in drawn  # what is copied stays as it was


def test_an_equation_takes_its_brackets_and_full_stop_along(hooks):
    drawn = hooks["on_page_content"](r'<p>a vector (<span class="arithmatex">\(c = 1\)</span>), or</p>')
    assert re.fullmatch(r'<p>a vector <span class="equation">\(<math.*</math>\),</span> or</p>', drawn)


def test_every_picture_has_a_caption():
    for page in site_pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        bare = re.findall(r"^!\[[^\n]*$(?!\n\*[^*\n].*\*\n(\n|\Z))", text, re.M)
        assert not bare, f"{page}: the line under a picture is its caption, *…*, with an empty line after it: {bare}"


def test_pictures_of_the_site_are_used_and_small():
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in [*site_pages(), "README.md"])
    for folder, kind, script in (("images", ".svg", "figures.py"), ("images/screens", ".png", "screens.py")):
        made = (ROOT / "docs" / script).read_text(encoding="utf-8")
        for picture in (ROOT / "docs" / folder).iterdir():
            if picture.is_dir():
                continue
            assert picture.suffix == kind
            assert picture.stat().st_size < 200_000
            assert f"{folder}/{picture.name})" in pages
            assert f'"{picture.stem}"' in made


def test_the_font_of_the_site_has_all_letters_of_its_equations():
    convert = pytest.importorskip("latex2mathml.converter").convert
    fonts = pytest.importorskip("fontTools.ttLib")
    known = set(map(chr, fonts.TTFont(ROOT / "docs" / "fonts" / "stix_two_math.woff").getBestCmap()))
    for page in site_pages():
        prose = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for equation in re.findall(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(\S[^$\n]*?)\$", prose):
            drawn = html.unescape(convert("".join(equation)))
            assert set(re.sub(r"<[^>]*>", "", drawn)) <= known, f"{page}: {equation}"
            for letter in re.findall(r"<mi>(.)</mi>", drawn):  # which browsers draw in italics
                assert letter == "h" or italic(letter) in known, f"{page}: {letter}"


def italic(letter: str) -> str:
    name = unicodedata.name(letter).replace("LATIN ", "").replace("GREEK ", "").replace(" LETTER", "")
    try:
        return unicodedata.lookup(f"MATHEMATICAL ITALIC {name}")
    except KeyError:
        return letter  # there is no italic form


def test_the_log_begins_with_its_entries():
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- (\d{4}-\d\d-\d\d): \[(.+)\]\(#", text, re.M)
    assert [f"{date}: {title}" for date, title in listed] == re.findall(r"^## (.+)$", text, re.M)
