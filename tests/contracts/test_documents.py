"""Pages are true as far as a program can tell: links lead somewhere, results are cited, tables are as made today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
NOTES = sorted(ROOT.glob("kernel_specs/*/NOTES.md"))
RESULTS = ROOT / "bench/results"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A page, the markers of what a program writes there, and the program.
TABLES = [
    ("kernel_timings.md", "results", "bench.table"),
    ("benchmarks.md", "steps", "bench.decode_table"),
    ("benchmarks.md", "steps of groups", "bench.decode_ranks_table"),
    ("benchmarks.md", "draft", "bench.draft_table"),
]


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page

        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_result_is_cited_and_every_cited_result_exists():
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, *NOTES])
    there = {path.name for path in RESULTS.glob("*.json")}
    cited = set(re.findall(r"([\w.-]+\.json)\b", text)) | {
        path.name
        for pattern in re.findall(r"bench/results/([\w.-]*\*[\w.*-]*)", text)
        for path in RESULTS.glob(pattern)
    }

    assert there - cited == set()
    assert set(re.findall(r"bench/results/([\w.-]+\.json)", text)) - {"X.json"} <= there


@pytest.mark.parametrize(("page", "markers", "program"), TABLES)
def test_a_table_is_what_its_program_makes_of_the_files_it_names(page, markers, program, tmp_path):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = re.search(f"<!-- {markers}: begin -->(.*)<!-- {markers}: end -->", text, re.DOTALL)[1]
    named = dict.fromkeys(re.findall(r"`(?:bench/results/)?([\w.-]+\.json)`", section))
    copy = tmp_path / page
    copy.write_text(text, encoding="utf-8")
    command = [sys.executable, "-P", "-m", program, *(str(RESULTS / name) for name in named), "--into", str(copy)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True)

    assert copy.read_text(encoding="utf-8") == text


def test_every_program_that_a_page_names_exists():
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, *NOTES])
    modules = set(re.findall(r"python -m ((?:bench|cache_tools)[\w.]*)", text))
    scripts = set(re.findall(r"\b((?:bench|bin)/[\w-]+(?:\.py)?)\b", text)) - {"bench/results"}

    assert modules
    assert scripts
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    for script in scripts:
        assert list(ROOT.glob(script + "*")), script


def options_of(module):
    """Of a program of bench, and of the modules that add to its parser."""
    path = ROOT / f"bench/{module}.py"
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    others = re.findall(r"(\w+)\.(?:add_arguments|parser)\(", source)
    return set(re.findall(r"\"(--[a-z-]+)\"", source)).union(*(options_of(other) for other in others))


def test_every_option_of_a_measurement_in_a_command_exists():
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, *NOTES])
    scripts = {
        path.name: found[1]
        for path in (ROOT / "bin").iterdir()
        if path.is_file() and (found := re.search(r"exec .*-m bench\.(\w+)", path.read_text(encoding="utf-8")))
    }
    commands = [(module, rest) for module, rest in re.findall(r"python -m bench\.(\w+)([^\n`#]*)", text)]
    commands += [(scripts[name], rest) for name, rest in re.findall(r"bin/([\w-]+)([^\n`#]*)", text) if name in scripts]
    unknown = [
        (module, option)
        for module, rest in commands
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)
        if option not in options_of(module) | {"--help", "--no-quack"}
    ]

    assert len(commands) > 30
    assert unknown == []


def test_every_program_of_bench_is_named_or_imported_somewhere():
    programs = {path.stem for path in (ROOT / "bench").glob("*.py")}
    files = [*PAGES, *NOTES, *ROOT.glob("bin/*"), *ROOT.glob("bench/*.py"), *ROOT.glob("tests/**/*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file()}

    for program in programs:
        name = re.compile(rf"\bbench[./]{program}\b|\bfrom bench import .*\b{program}\b|bench\.{program}\b")
        others = [text for path, text in texts.items() if path.stem != program or path.suffix != ".py"]
        assert any(name.search(text) for text in others), program


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CHANGELOG.md"])
def test_every_kernel_is_named(page):
    named = set(re.findall(r"`(\w+)`", (ROOT / page).read_text(encoding="utf-8")))

    assert {path.parent.name for path in ROOT.glob("kernel_specs/*/spec.py")} <= named
