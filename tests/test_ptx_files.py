"""The shipped PTX: it assembles for every GPU we promise, and multimem.st alone writes to the multicast address."""

import re

import pytest
from cuda.bindings.nvjitlink import nvJitLinkError
from cuda.core import Linker, LinkerOptions, ObjectCode

from lamport_numba import ptx

ARCHITECTURES = ("sm_90", "sm_100", "sm_103", "sm_120")
MULTICAST_FILES = [name for name in ptx.names() if "multicast" in name]


def assemble(text, architecture):
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=LinkerOptions(arch=architecture))
    return linker.link("cubin").code


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ptx.names())
def test_file_assembles(name, architecture):
    assert assemble(ptx.read(name), architecture).startswith(b"\x7fELF")


def test_a_mistake_does_not_assemble():
    text = ptx.read("lamport_peer.ptx")
    broken = text.replace("setp.lt.u32 %payload", "setp.lt.u32 %undeclared", 1)
    assert broken != text
    with pytest.raises(nvJitLinkError, match="undeclared"):
        assemble(broken, "sm_90")


@pytest.mark.parametrize("name", ptx.names())
def test_file_runs_on_old_drivers_and_later_chips(name):
    text = ptx.read(name)
    assert re.search(r"^\.version 8\.1$", text, re.M)
    assert re.search(r"^\.target sm_90$", text, re.M)


@pytest.mark.parametrize("name", ptx.names())
def test_file_explains_itself(name):
    text = ptx.read(name)
    assert text.startswith("// ")
    assert max(map(len, text.splitlines())) <= 128


def through_multicast(text):
    """(opcode, reaches memory through the multicast address) of every memory instruction, in order."""
    statements = [line.split("//")[0].strip() for line in text.splitlines()]
    derived = set()
    found = []
    for statement in statements:
        match = re.match(r"(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.*);$", statement)
        if not match:
            continue
        opcode, operands = match.groups()
        address = re.search(r"\[(%\w+)[^\]]*\]", operands)
        if opcode.startswith("ld.param"):
            if re.search(r"\[multicast\b", operands):
                derived.add(operands.split(",")[0].strip())
        elif address and re.match(r"(ld|st|atom|red|multimem)\b", opcode):
            found.append((opcode, address.group(1) in derived))
        elif not re.match(r"(st|bra|ret|bar|fence|grid)", opcode):
            target, *sources = (part.strip() for part in operands.split(","))
            if derived & set(sources):
                derived.add(target)
            else:
                derived.discard(target)
    return found


@pytest.mark.parametrize("name", MULTICAST_FILES)
def test_multicast_address_is_written_with_multimem_alone(name):
    accesses = through_multicast(ptx.read(name))
    assert [opcode for opcode, multicast in accesses if multicast]
    assert all(opcode.startswith("multimem.st.relaxed.sys.global") == multicast for opcode, multicast in accesses)


@pytest.mark.parametrize("name", MULTICAST_FILES)
def test_an_ordinary_store_through_the_multicast_address_is_seen(name):
    text = ptx.read(name)
    broken = re.sub(r"multimem\.st\.relaxed\.sys\.global\.(v4\.f32|b64)", r"st.relaxed.sys.global.\1", text, count=1)
    assert broken != text
    accesses = through_multicast(broken)
    assert not all(opcode.startswith("multimem.st.relaxed.sys.global") == multicast for opcode, multicast in accesses)


@pytest.mark.parametrize("name", [name for name in ptx.names() if "multicast" not in name])
def test_other_files_hold_no_multimem(name):
    code = "\n".join(line.split("//")[0] for line in ptx.read(name).splitlines())
    assert "multimem" not in code
