"""Records made to hurt: each has a correct digest of its own and is refused all the same, before anything is opened."""

import dataclasses
import hashlib
import json

import pytest
from stub_cache import artifact_of, other_toolchain, record_of, wanted

from jitspark.cache.record import MAX_RECORD_BYTES, Record, record_from_bytes
from jitspark.errors import EntryError
from jitspark.key import Key, digest_of, plain, toolchain_digest

ITEM = wanted(1)[0]


@pytest.fixture
def body(templates):
    return plain(record_of(ITEM, artifact_of(ITEM, templates), other_toolchain()))


def sealed(text):
    """A record file with this body and the digest that it should have."""
    return b'{"body":' + text + b',"digest":"' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def text_of(body):
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def written(body):
    return sealed(text_of(body))


def read(content, key=ITEM.key, toolchain=None):
    return record_from_bytes(content, "here", key, toolchain or toolchain_digest(other_toolchain()))


def test_the_record_that_the_others_are_made_from_is_good(body):
    assert read(written(body)).kernel == "stub"


def test_what_is_written_is_read_back_equal(body):
    record = Record(**{**body, "needs": tuple(body["needs"])})

    assert read(record.to_bytes()) == record


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Record)])
@pytest.mark.parametrize("value", [None, True, 0, -1, 2**70, 1.5, "", "\n", ["a b"], {}, {"a": [1]}])
def test_a_field_of_another_type_or_value_is_refused(body, field, value):
    with pytest.raises(EntryError):
        read(written({**body, field: value}))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Record)])
def test_a_missing_field_is_refused(body, field):
    del body[field]

    with pytest.raises(EntryError):
        read(written(body))


HOSTILE_FIELDS = {
    "an unknown field": {"extra": 1},
    "an escape sequence": {"signature": "\x1b[2J"},
    "a lone surrogate": {"signature": "\ud800"},
    "a path as a symbol": {"symbol": "/bin/sh"},
    "another kernel's symbol": {"symbol": "__tvm_ffi_other"},
    "a path as a need": {"needs": ["../../lib.so"]},
    "too many needs": {"needs": ["a"] * 1000},
    "a need that is a number": {"needs": [1]},
    "needs as text": {"needs": "abc"},
    "an artifact of 2 GB": {"size": 2**31},
    "a digest in capitals": {"sha256": "A" * 64},
    "a runtime with a path": {"runtime": "cu13/../x"},
    "another recipe": {"recipe": {"kernel": "stub"}},
    "another toolchain": {"toolchain": {}},
    "a signature of 100 KB": {"signature": "x" * 100_000},
}


@pytest.mark.parametrize("changes", HOSTILE_FIELDS.values(), ids=HOSTILE_FIELDS.keys())
def test_a_hostile_field_is_refused(body, changes):
    with pytest.raises(EntryError):
        read(written({**body, **changes}))


def deep(levels):
    return b"[" * levels + b"]" * levels


HOSTILE_TEXTS = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "half an object": b'{"kernel":',
    "bytes that are no text": b"\xff\xfe",
    "not a number": b'{"version":NaN}',
    "a number of 10,000 digits": b'{"version":' + b"9" * 10_000 + b"}",
    "100,000 levels": deep(100_000),
    "5,000 levels in the recipe": b'{"kernel":"stub","recipe":'
    + deep(5000)
    + b',"runtime":"cu13","toolchain":{},"version":1}',
    "5,000 levels in the toolchain": b'{"recipe":{},"runtime":"cu13","toolchain":' + deep(5000) + b',"version":1}',
    "marks in the wrong order": b'{"version":1,"toolchain":{},"runtime":"cu13","recipe":{}}',
    "larger than any record": b'"' + b"x" * MAX_RECORD_BYTES + b'"',
}


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS.keys())
def test_a_hostile_text_is_refused(text):
    with pytest.raises(EntryError):
        read(sealed(text))


@pytest.mark.parametrize("levels", [40, 250, 900, 5000, 50_000])
def test_a_deep_recipe_under_the_digest_of_its_own_is_refused_without_a_crash(body, levels):
    """Whoever writes the directory's name may choose a recipe that matches it."""
    recipe = b'{"a":' + deep(levels) + b',"host":"x86_64-linux","kernel":"stub","target":"sm_90a"}'
    key = Key("sm_90a", "x86_64-linux", "stub", hashlib.sha256(recipe).hexdigest())
    text = text_of({**body, "recipe": "@"}).replace(b'"@"', recipe)

    try:
        read(sealed(text), key=key)
    except EntryError:
        assert levels > 40
    else:
        assert levels == 40


@pytest.mark.parametrize("change", [(b":", b": "), (b'{"kernel"', b'{ "kernel"'), (b'"size":', b'"size":1,"size":')])
def test_a_body_that_is_not_canonical_is_refused(body, change):
    text = text_of(body).replace(*change, 1)
    assert text != text_of(body)

    with pytest.raises(EntryError):
        read(sealed(text))


@pytest.mark.parametrize(
    "parts",
    [
        ("..", "x86_64-linux", "stub", "0" * 64),
        ("sm_90a", "../..", "stub", "0" * 64),
        ("sm_90a", "x86_64-linux", "a/../b", "0" * 64),
        ("sm_90a", "x86_64-linux", "stub", "../" + "0" * 61),
        ("sm_90a", "x86_64-linux", "stub\n", "0" * 64),
        ("sm_90a", "x86_64-linux", "stub", "0" * 64 + "\n"),
        ("sm_90a", "x86_64-linux", "", "0" * 64),
    ],
)
def test_a_name_that_climbs_out_of_the_root_is_no_key(parts):
    with pytest.raises(ValueError, match="not a key"):
        Key(*parts)


def test_the_digest_in_the_path_is_the_digest_of_the_recipe():
    assert ITEM.key.recipe == digest_of(ITEM.recipe) == digest_of(plain(ITEM.recipe))
