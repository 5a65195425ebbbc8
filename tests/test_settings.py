import re
from pathlib import Path

import pytest

from lamport_numba import settings
from lamport_numba.errors import SettingError


def test_defaults():
    values = {name: settings.get(name, {}) for name in settings.TABLE}
    assert values["DEVICE"] == "auto"
    assert values["TIMEOUT"] == 600.0
    assert values["SHARE_DEVICE"] is False
    assert values["EMULATED_DEVICES"] is None


def test_names_with_and_without_prefix():
    assert settings.get("LAMPORT_NUMBA_SEED", {"LAMPORT_NUMBA_SEED": "0x10"}) == 16
    assert settings.get("SEED", {"LAMPORT_NUMBA_SEED": " 7 "}) == 7


def test_unknown_setting_is_a_key_error():
    with pytest.raises(KeyError):
        settings.get("NOPE", {})


def test_empty_means_default():
    assert settings.get("DEVICE", {"LAMPORT_NUMBA_DEVICE": ""}) == "auto"


def test_read_late(monkeypatch):
    monkeypatch.setenv("LAMPORT_NUMBA_TIMEOUT", "1.5")
    assert settings.get("TIMEOUT") == 1.5


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_true(text):
    assert settings.get("COMPARE", {"LAMPORT_NUMBA_COMPARE": text}) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_false(text):
    assert settings.get("COMPARE", {"LAMPORT_NUMBA_COMPARE": text}) is False


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEVICE", "gpu"),
        ("TRANSPORT", "fast"),
        ("COMPARE", "2"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "-1"),
        ("TIMEOUT", "nan"),
        ("TIMEOUT", "inf"),
        ("TIMEOUT", "ten"),
        ("EMULATED_DEVICES", "0"),
        ("EMULATED_DEVICES", "1.5"),
        ("RESIDENCY", "0"),
        ("SEED", "-1"),
        ("FABRIC", "slow"),
    ],
)
def test_bad_value_names_variable_value_and_what_it_takes(name, text):
    with pytest.raises(SettingError) as caught:
        settings.get(name, {f"LAMPORT_NUMBA_{name}": text})
    for part in (f"LAMPORT_NUMBA_{name}", repr(text), settings.TABLE[name].takes):
        assert part in str(caught.value)
    with pytest.raises(SettingError):
        settings.check({f"LAMPORT_NUMBA_{name}": text})


def test_check_takes_good_values():
    settings.check({"LAMPORT_NUMBA_DEVICE": "EMULATED", "LAMPORT_NUMBA_SEED": "3"})


def test_unknown_variables_are_found():
    assert settings.unknown({"LAMPORT_NUMBA_DEVISE": "x", "LAMPORT_NUMBA_DEVICE": "cuda", "PATH": "/"}) == [
        "LAMPORT_NUMBA_DEVISE"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LAMPORT_NUMBA_DISABLE_MULTICAST", "1"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    ],
)
def test_each_switch_turns_multicast_off(name, value):
    assert settings.multicast_switched_off({name: value}) == f"{name}={value}"


def test_multicast_stays_on():
    assert settings.multicast_switched_off({}) is None
    opposite = {
        "LAMPORT_NUMBA_DISABLE_MULTICAST": "0",
        "NCCL_NVLS_ENABLE": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0",
        "NVSHMEM_DISABLE_NVLS": "0",
    }
    assert settings.multicast_switched_off(opposite) is None


def test_table_lists_every_setting_once():
    text = settings.markdown()
    for setting in settings.TABLE.values():
        assert text.count(f"| `{setting.name}` |") == 1


def test_documentation_is_current():
    written = Path(__file__).parent.parent / "docs" / "settings.md"
    assert written.read_text() == settings.document(), "run: python -m lamport_numba.settings > docs/settings.md"


def test_every_setting_that_the_package_reads_exists():
    package = Path(settings.__file__).parent
    read = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"""settings\.get\(["'](\w+)["']|LAMPORT_NUMBA_([A-Z_]*[A-Z])""", file.read_text())
    }
    names = {first or second for first, second in read}
    assert "DEVICE" in names
    assert names <= set(settings.TABLE)
