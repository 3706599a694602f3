"""pack, unpack, merge, diff, verify and doctor as people run them, by either program."""

import json
import os

import pytest
from pack_fixtures import everything_below, filled, make_keys, run_as_people_do

PROGRAMS = ("jitspark", "cache_tools")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def run(tmp_path, templates):
    """A function that runs a program in a folder that holds a cache of three entries."""
    filled(tmp_path / "cache", templates, 2, 1)

    def run_in(program, *arguments, cache="cache"):
        variables = {"JITSPARK_CACHE_DIR": str(tmp_path / cache), "XDG_RUNTIME_DIR": str(tmp_path)}
        return run_as_people_do(program, *arguments, environment=variables)

    return run_in


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_signed_pack_goes_there_and_is_the_same_there(program, run, tmp_path, keys):
    pack = tmp_path / "x.tar.zst"
    packed = run(program, "pack", pack, "--sign", keys[0])
    unpacked = run(program, "unpack", pack, "--trust", keys[1], cache="there")
    verified = run(program, "verify", "--trust", keys[1], cache="there")
    same = run(program, "diff", tmp_path / "cache", tmp_path / "there")

    assert [each.returncode for each in (packed, unpacked, verified, same)] == [0, 0, 0, 0], unpacked.stderr
    assert "3 entries unpacked" in unpacked.stdout
    assert f"needs host {os.uname().machine}-linux: this machine has it" in unpacked.stdout
    assert "every file is signed" in verified.stdout
    assert same.stdout.startswith("3 entries the same")


@pytest.mark.parametrize("program", PROGRAMS)
def test_everything_answers_in_json(program, run, tmp_path, keys):
    pack = tmp_path / "x.tar.zst"
    packed = json.loads(run(program, "pack", pack, "--json").stdout)
    refused = run(program, "unpack", pack, "--trust", keys[1], "--json", cache="there")
    unpacked = json.loads(run(program, "unpack", pack, "--allow-unsigned", "--json", cache="there").stdout)
    merged = json.loads(run(program, "merge", tmp_path / "m", pack, "--allow-unsigned", "--json").stdout)

    assert (packed["entries"], packed["signer"]) == (3, "")
    assert (refused.returncode, json.loads(refused.stdout)["error"]) == (4, "PackError")
    assert (unpacked["new"], [need["what"] for need in unpacked["machine"]][:2]) == (3, ["host", "target"])
    assert merged["sha256"] == packed["sha256"]
    assert json.loads(run(program, "verify", pack, "--json").stdout)["entries"] == 3


def test_a_refusal_leaves_the_cache_directory_empty(run, tmp_path):
    pack = tmp_path / "x.tar.zst"
    run("jitspark", "pack", pack)
    pack.write_bytes(pack.read_bytes()[:-1])
    done = run("jitspark", "unpack", pack, "--allow-unsigned", cache="there")

    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) == 1
    assert not everything_below(tmp_path / "there")
    assert run("jitspark", "unpack", pack, "--trust", tmp_path / "none.pub").returncode == 2


def test_diff_and_verify_end_with_1_where_something_differs(run, tmp_path, templates, keys):
    filled(tmp_path / "other", templates, 2)
    run("jitspark", "pack", tmp_path / "other.tar.zst", cache="other")

    assert run("jitspark", "diff", tmp_path / "cache", tmp_path / "other.tar.zst").returncode == 1
    assert run("jitspark", "verify", "--trust", keys[1]).returncode == 1
    assert run("jitspark", "verify", tmp_path / "cache").returncode == 0


def test_rebuilding_without_a_compiler_is_one_error(run, tmp_path):
    done = run("jitspark", "verify", tmp_path / "cache", "--rebuild", "ten")

    assert done.returncode == 2
    assert "--rebuild" in done.stderr


def test_doctor_says_what_the_cache_and_a_pack_need(run, tmp_path):
    run("jitspark", "pack", tmp_path / "x.tar.zst")
    done = run("jitspark", "doctor", "--pack", tmp_path / "x.tar.zst", "--json")
    text = {check["part"]: (check["status"], check["text"]) for check in json.loads(done.stdout)["checks"]}

    assert text["cached entries"][0] == "PASS"
    assert text["cached entries"][1].startswith(f"3 entries for {os.uname().machine}-linux and sm_90a; 0 symbols")
    assert text["pack x.tar.zst"][0] == "PASS"
    assert text["pack x.tar.zst"][1].endswith("not signed")


def test_doctor_fails_for_a_bad_pack(run, tmp_path):
    (tmp_path / "bad").write_bytes(b"no pack")
    done = run("jitspark", "doctor", "--pack", tmp_path / "bad", "--json")

    assert done.returncode == 1
    assert [c["status"] for c in json.loads(done.stdout)["checks"] if c["part"] == "pack bad"] == ["FAIL"]
