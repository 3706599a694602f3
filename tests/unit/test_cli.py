"""The command line: options, errors with their exit codes, and how progress is told."""

import json
import re

import pytest
import stub_cache

from cache_tools.command_line import LOG_LINES, error_text, run
from cache_tools.table import table
from jitspark.building.progress import Event
from jitspark.cache.lock import Holder
from jitspark.cli.app import app
from jitspark.cli.progress_display import Estimate, PlainLines
from jitspark.cli.selection import Selection, parse_targets, parse_tp
from jitspark.errors import CompileError, TargetError, UsageError
from jitspark.gpus import Gpu, Machine, find_gpus, targets_of

FOUR_PARTS = {"where": "a", "found": "b", "needed": "c", "remedy": "D."}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run `jitspark ...` with a cache of its own; the exit code, standard output and standard error."""
    monkeypatch.setenv("JITSPARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            run(app, list(arguments), "jitspark")
        return end.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(("text", "sizes"), [("8", (8,)), ("8,16", (8, 16)), ("16, 8,16", (16, 8))])
def test_tp_sizes(text, sizes):
    assert parse_tp(text) == sizes


@pytest.mark.parametrize("text", ["", "eight", "8,", "-8", "0", "8;16", "٨", "99999"])
def test_what_is_no_tp_size_is_refused(text):
    with pytest.raises(UsageError):
        parse_tp(text)


def test_targets_as_given_each_once():
    assert parse_targets("sm_100a, sm_90a,sm_100a", pytest.fail) == ("sm_100a", "sm_90a")


@pytest.mark.parametrize("text", ["sm_80", "sm_100a,", "SM_100A"])
def test_an_unknown_target_is_refused(text):
    with pytest.raises(TargetError):
        parse_targets(text, pytest.fail)


@pytest.mark.parametrize(
    ("gpus", "targets", "said"),
    [
        ((), ("sm_100a",), "no GPU found"),
        ((Gpu("B", (10, 3)), Gpu("H", (9, 0)), Gpu("H", (9, 0))), ("sm_103a", "sm_90a"), "B, H"),
        ((Gpu("A", (8, 0)),), ("sm_100a",), "no kernel supports"),
    ],
)
def test_without_targets_the_gpus_decide_and_it_is_said(monkeypatch, gpus, targets, said):
    monkeypatch.setattr("jitspark.gpus.find_gpus", lambda: Machine("1", gpus))
    lines = []

    assert parse_targets("", lines.append) == targets
    assert said in lines[0] and targets[0] in lines[0]


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    import pynvml

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert find_gpus() == Machine(None, ())
    assert targets_of(find_gpus().gpus) == ()


def test_the_warm_command_names_everything_that_was_chosen():
    selection = Selection((8, 16), ("sm_100a",), "/a b/model.toml", ("rmsnorm",))

    assert selection.warm_command() == (
        "jitspark warm --tp 8,16 --target sm_100a --geometry '/a b/model.toml' --kernel rmsnorm"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--tp", "5"], 3, "GeometryError"),
        (["--tp", "x"], 2, "UsageError"),
        (["--tp", "8", "--target", "sm_1"], 3, "TargetError"),
        (["--tp", "8", "--geometry", "unheard_of"], 3, "GeometryError"),
        (["--tp", "8", "--geometry", "missing/file.toml"], 3, "GeometryError"),
        (["--tp", "8", "--kernel", "unheard_of"], 3, "SpecError"),
    ],
)
def test_a_bad_selection_is_one_error_with_its_code(command, arguments, code, error):
    status, out, err = command("warm", *arguments, "--json")
    value = json.loads(out.splitlines()[-1])

    assert (status, value["error"], value["exit_code"]) == (code, error, code)
    assert all(value[part] in err for part in ("where", "found", "needed", "remedy"))
    assert "Traceback" not in err


@pytest.mark.parametrize("field", ["hidden_size", "rope_theta"])
def test_a_geometry_file_with_an_unusable_field_is_one_error(command, tmp_path, field):
    from jitspark.geometry import GEOMETRY_DIR

    text = (GEOMETRY_DIR / "tiny.toml").read_text()
    (tmp_path / "tiny.toml").write_text(re.sub(rf"(?m)^{field} = .*$", f'{field} = "many"', text))
    status, _, err = command("warm", "--tp", "1", "--geometry", str(tmp_path / "tiny.toml"))

    assert status == 3
    assert field in err and "many" in err


@pytest.mark.parametrize("arguments", [[], ["warm"], ["warm", "--tp", "8", "--jobs", "0"], ["unheard_of"]])
def test_an_unusable_command_line_ends_with_two(command, arguments):
    status, _, _ = command(*arguments)

    assert status == 2


def test_a_bad_variable_ends_with_two(command, monkeypatch):
    monkeypatch.setenv("JITSPARK_COMPILE", "sometimes")
    status, _, err = command("warm", "--tp", "8")

    assert status == 2
    assert "JITSPARK_COMPILE" in err and "sometimes" in err


@pytest.mark.parametrize("asked", [(), ("--traceback",)])
def test_a_traceback_is_shown_only_when_asked_for_and_changes_no_exit_code(command, asked):
    status, _, err = command("warm", "--tp", "x", *asked)

    assert status == UsageError.exit_code
    assert ("parse_tp" in err) == bool(asked)  # where it was raised
    assert err.endswith("jitspark: --tp: found 'x'; needed TP sizes such as 8 or 8,16. Correct --tp.\n")


def test_a_dry_run_lists_every_key_and_writes_nothing(command, tmp_path):
    kernels = ("--kernel", "rmsnorm", "--kernel", "gated_residual_rmsnorm")
    status, out, err = command(
        "warm", "--tp", "1,2", "--geometry", "tiny", "--target", "sm_90a", *kernels, "--dry-run", "--json"
    )
    value = json.loads(out)

    assert status == 0
    assert value["entries"] == len(set(value["missing"])) > 10 and value["hits"] == 0
    assert all(key in err for key in value["missing"])
    assert not (tmp_path / "cache").exists()


def test_ls_of_no_cache_is_empty(command):
    status, out, _ = command("ls", "--json")

    assert (status, json.loads(out)) == (0, {"roots": [], "entries": [], "bytes": 0})


def test_ls_counts_entries_by_kernel_target_and_toolchain(command, tmp_path):
    templates = stub_cache.make_templates(tmp_path)
    items = [*stub_cache.wanted(3), *stub_cache.wanted(2, kernel="other", target="sm_100a")]
    stub_cache.fill(tmp_path / "cache", items, templates, stub_cache.other_toolchain())
    _, text, _ = command("ls")
    _, listed, _ = command("ls", "--entries")
    _, as_json, _ = command("ls", "--json")

    rows = [line.split() for line in text.splitlines()]
    assert [row[:2] + row[5:6] for row in rows[1:3]] == [["other", "sm_100a", "2"], ["stub", "sm_90a", "3"]]
    assert all(str(item.key) in listed for item in items)
    assert {entry["recipe"] for entry in json.loads(as_json)["entries"]} == {item.key.recipe for item in items}


def test_pack_and_unpack_through_the_command_line(command, tmp_path, monkeypatch):
    templates = stub_cache.make_templates(tmp_path)
    items = [*stub_cache.wanted(3), *stub_cache.wanted(2, target="sm_100a")]
    stub_cache.fill(tmp_path / "cache", items, templates, stub_cache.other_toolchain())
    packed = command("pack", str(tmp_path / "x.tar"), "--target", "sm_100a")
    monkeypatch.setenv("JITSPARK_CACHE_DIR", str(tmp_path / "second"))
    refused = command("unpack", str(tmp_path / "x.tar"))
    unpacked = command("unpack", str(tmp_path / "x.tar"), "--allow-unsigned")

    assert (packed[0], refused[0], unpacked[0]) == (0, 4, 0)
    assert "--trust KEY.pub" in refused[2]
    assert "2 entries" in packed[1] and "2 entries unpacked" in unpacked[1]
    assert [path.name[:7] for path in (tmp_path / "second/artifacts-v1").iterdir()] == ["sm_100a"]


@pytest.mark.parametrize("verb", [("warm", "--tp", "1", "--geometry", "tiny"), ("prune",)])
def test_a_cache_directory_that_is_a_file_is_called_that(command, tmp_path, verb):
    (tmp_path / "cache").write_bytes(b"")
    status, _, err = command(*verb)

    assert status == 4
    assert f"cache directory {tmp_path}/cache: found Not a directory;" in err


def test_a_deployment_with_missing_entries_is_not_packed(command, tmp_path):
    status, _, err = command("pack", str(tmp_path / "x.tar"), "--tp", "1", "--geometry", "tiny", "--target", "sm_90a")

    assert status == 7
    assert re.search(r"cache: found \d+ missing: .*\); needed an entry for every key\. Run `", err)
    assert err.endswith("Run `jitspark warm --tp 1 --target sm_90a --geometry tiny` first.\n")
    assert not (tmp_path / "x.tar").exists()


@pytest.mark.parametrize(("name", "code"), [("rmsnrm", 2), ("0123", 2), ("rmsnorm", 0)])
def test_explain_tells_kernels_from_keys(command, name, code):
    status, out, err = command("explain", name, "--tp", "8", "--target", "sm_90a")

    assert status == code
    assert ("no entry of rmsnorm" in out) == (code == 0), err


def event(kind, done, seconds=0.0, holder=None):
    (item,) = stub_cache.wanted(1)
    return Event(kind, item.key, "stub(n=0)", done, 10, seconds, holder)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_estimate_counts_from_the_first_compile_and_not_the_hits():
    clock = Clock()
    estimate = Estimate(clock)
    before = [estimate.seconds_left(event("hit", done)) for done in (1, 2, 3, 4)]
    clock.now = 106.0
    first = estimate.seconds_left(event("compiled", 5, seconds=2.0))
    clock.now = 110.0
    second = estimate.seconds_left(event("hit", 7))

    assert before == [None] * 4
    assert (first, second) == (pytest.approx(10.0), pytest.approx(6.0))


def test_plain_lines_tell_each_compile_and_otherwise_one_at_least_every_five_seconds():
    clock, lines = Clock(), []
    shown = PlainLines(clock, lines.append)
    for tenth in range(0, 200, 20):  # as often as a build reports: every two seconds
        clock.now = 100.0 + tenth / 10
        shown.show(event("waiting", 3, tenth / 10, Holder(42, "node7", "rmsnorm(n=1)", 0.0)))
    times = [float(re.search(r"for (\d+) s", line)[1]) for line in lines]
    shown.show(event("compiled", 4, 1.5))

    assert all(later - sooner <= 5.0 for sooner, later in zip([0.0, *times], times, strict=False))
    assert "process 42 on node7" in lines[0] and str(stub_cache.wanted(1)[0].key) in lines[0]
    assert lines[-1].startswith("[4/10] compiled stub(n=0)") and "1.5 s" in lines[-1]


def test_hits_at_the_start_are_not_told_one_by_one():
    lines = []
    shown = PlainLines(Clock(), lines.append)
    for done in range(1, 10):
        shown.show(event("hit", done))

    assert lines == []


def test_a_log_is_shortened_and_not_repeated():
    long = CompileError(**FOUR_PARTS, log="\n".join(f"line {n}" for n in range(LOG_LINES + 5)))

    assert error_text(long).splitlines()[-2:] == [f"    line {LOG_LINES - 1}", "    ... 5 more lines"]
    assert error_text(CompileError(**FOUR_PARTS, log="b")) == "a: found b; needed c. D."


def test_a_table_aligns_numbers_to_the_right():
    assert list(table(("kernel", "entries"), [["a", 5], ["longer", 12]])) == [
        "kernel  entries",
        "a             5",
        "longer       12",
    ]
