"""The fleet's secret: its file, what derives from it, and how it is changed while an earlier one still counts."""

import ast
import inspect
from pathlib import Path

import pytest

from tests.router.identity.key_rig import put
from trunkline_router.access.access import Tenants
from trunkline_router.access.identity import fleet_secret
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.access.identity.fleet_secret import (
    MOST_SECRETS,
    FleetSecret,
    Seal,
    derived_key,
    read_fleet_secret,
)
from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.serving import access_of
from trunkline_router.settings import RouterSettings

SECRET = "a fleet secret of thirty-two bytes"
FIRST, SECOND = SECRET.encode(), b"another secret of thirty-two bytes"


def of_file(path: Path, content: str | bytes) -> FleetSecret:
    put(path, content)
    return read_fleet_secret("", str(path))


def test_a_secret_is_read_from_its_file_without_the_line_break(tmp_path: Path) -> None:
    assert of_file(tmp_path / "secret", SECRET + "\n") == FleetSecret(FIRST) == read_fleet_secret(SECRET, "")
    assert not read_fleet_secret("", "")


@pytest.mark.parametrize("content", [FIRST + b"\n" + SECOND, b"\n" + FIRST + b" \r\n\n\t" + SECOND + b"\r\n\n"])
def test_the_first_line_of_the_file_is_the_current_secret_and_the_others_are_earlier_ones(
    tmp_path: Path, content: bytes
) -> None:
    assert of_file(tmp_path / "secret", content) == FleetSecret(FIRST, (SECOND,))


def test_a_secret_of_the_environment_is_one_whatever_it_contains() -> None:
    assert read_fleet_secret(f"{SECRET}\nshort", "") == FleetSecret(f"{SECRET}\nshort".encode())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "F has 0 bytes; allowed: 32 or more"),
        (b"\n \n", "F has 0 bytes; allowed: 32 or more"),
        (b"canary\n" + FIRST, "F has 6 bytes; allowed: 32 or more"),
        (FIRST + b"\n\ncanary\n", "F: line 3 has 6 bytes; allowed: 32 or more"),
        (b"\n".join([FIRST] * (MOST_SECRETS + 1)), f"F has {MOST_SECRETS + 1} secrets; allowed: {MOST_SECRETS}"),
        (b"\xff" * 5000, "F has more than 4096 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "secret"
    with pytest.raises(IdentityError) as caught:
        of_file(path, content)
    assert str(caught.value).startswith("--fleet-secret-file=" + said.replace("F", str(path), 1))
    assert "\n" not in str(caught.value)
    assert "canary" not in str(caught.value)


def test_a_key_is_for_one_purpose_and_a_sealed_text_cannot_be_changed() -> None:
    first, second = (derived_key(FIRST, purpose) for purpose in ("a", "b"))
    assert len({first, second, FIRST}) == 3
    seal, value = FleetSecret(FIRST).seal("a"), FleetSecret(FIRST).seal("a").sealed("text")
    assert seal.opened(value) == ("text", 0)
    assert FleetSecret(FIRST).seal("b").opened(value) is None
    for changed in (value + "x", "text", ":text", value.replace(":", ""), "", "\udcff:", "\udcff:\udcff"):
        assert seal.opened(changed) is None, changed


def test_the_newest_key_seals_and_each_key_opens() -> None:
    old, new, both = Seal(b"1" * 32), Seal(b"2" * 32), Seal(b"2" * 32, b"1" * 32)
    assert both.sealed("text") == new.sealed("text") != old.sealed("text")
    assert both.opened(new.sealed("text")) == ("text", 0)
    assert both.opened(old.sealed("text")) == ("text", 1)
    assert new.opened(old.sealed("text")) is None


def test_codes_are_compared_in_constant_time() -> None:
    source = inspect.getsource(Seal.opened)
    assert "hmac.compare_digest(" in source
    compared = [node for node in ast.walk(ast.parse(inspect.getsource(fleet_secret))) if isinstance(node, ast.Compare)]
    assert not [ast.unparse(node) for node in compared if "code" in ast.unparse(node)]


def salt_of(tmp_path: Path, content: bytes) -> bytes:
    """The salt of a tenant's cached prefixes."""
    put(tmp_path / "secret", content)
    identity = IdentitySettings(fleet_secret_file=str(tmp_path / "secret"))
    settings = RouterSettings(workers=("127.0.0.1:1",), identity=identity, grant_key="g" * 32)
    return access_of(settings, Tenants(), Authenticator()).caller((("x-trunkline-tenant", "acme"),)).cache_salt()


def test_cache_salts_derive_from_the_current_secret_alone(tmp_path: Path) -> None:
    first, second, both = (salt_of(tmp_path, content) for content in (FIRST, SECOND, SECOND + b"\n" + FIRST))
    assert both == second != first


def test_secrets_are_in_no_repr() -> None:
    assert SECRET not in repr(FleetSecret(FIRST, (FIRST,))) + repr(FleetSecret(FIRST).seal("a"))
