"""Runs `trunkline keys` as a process, without settings of this one, and asks a router that starts about keys."""

import os
import subprocess
from collections.abc import Mapping

from tests.cluster.processes import script
from tests.router.identity.key_rig import answer
from trunkline_router.access.identity.api_keys import ApiKey
from trunkline_router.access.identity.authenticator import authenticator_of
from trunkline_router.access.identity.redis_keys import RedisKeys
from trunkline_router.settings import RouterSettings

SECRET = "a fleet secret of thirty-two bytes"


def keys(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [script("trunkline"), "keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=with_own(environment))


def with_own(environment: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRUNKLINE_")}
    return own | dict(environment)


def created(*arguments: str, **environment: str) -> ApiKey:
    done = keys("create", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    key = ApiKey.parse(done.stdout.removesuffix("\n"))
    assert key is not None, "standard output has nothing but the key"
    assert key.secret not in done.stderr
    return key


async def answers(settings: RouterSettings, *made: ApiKey) -> list[str]:
    """What a router that starts with these settings answers to the keys."""
    authenticator = authenticator_of(settings)
    sources = []
    for source in authenticator._key_sources:
        assert isinstance(source, RedisKeys)
        sources.append(source)
    await authenticator.start()
    try:
        for source in sources:
            while not source.has_loaded:  # Redis answers late on a busy machine
                await source.poll()
        return [answer(authenticator, key.credential) for key in made]
    finally:
        for source in sources:
            await source.close()
