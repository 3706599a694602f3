"""The toolchain's fingerprint: what the packages put there counts; where, by whom and for which Python does not."""

import pytest

from jitspark.toolchain import content_digest

PACKAGE = """\
nvidia_cutlass_dsl/cutlass/cute.py,sha256=aaa,10
nvidia_cutlass_dsl/lib/libcute_dsl_runtime.so,sha256=bbb,20
"""
# What differs between two environments with the same packages.
ON_PYTHON_311 = """\
nvidia_cutlass_dsl/lib/_cutlass_ir.cu13.cpython-311-x86_64-linux-gnu.so,sha256=ccc,30
nvidia_cutlass_dsl/cutlass/__pycache__/cute.cpython-311.pyc,,
../../../bin/cute,sha256=ddd,40
nvidia_cutlass_dsl-4.8.0.dist-info/INSTALLER,sha256=eee,4
"""
ON_PYTHON_312 = """\
nvidia_cutlass_dsl-4.8.0.dist-info/INSTALLER,sha256=fff,3
nvidia_cutlass_dsl/cutlass/__pycache__/cute.cpython-312.pyc,,
../../../bin/cute,sha256=ggg,41
nvidia_cutlass_dsl/lib/_cutlass_ir.cu13.cpython-312-x86_64-linux-gnu.so,sha256=hhh,31
"""


def test_builders_on_two_pythons_have_one_fingerprint():
    assert content_digest(PACKAGE + ON_PYTHON_311) == content_digest(ON_PYTHON_312 + PACKAGE) == content_digest(PACKAGE)


@pytest.mark.parametrize("change", [("aaa", "aab"), ("bbb", "bba"), ("cute.py", "cuta.py")])
def test_any_file_of_the_package_counts(change):
    assert content_digest(PACKAGE.replace(*change)) != content_digest(PACKAGE)
