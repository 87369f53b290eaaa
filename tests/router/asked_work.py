"""Requests for work that no endpoint offers yet."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from trunkline.v1.worker_pb2 import Work
from trunkline_router.request.prepare import Preparer
from trunkline_router.request.request_call import Extras, PreparedRequest, RequestCall

Ask = Callable[[Work], None]


def asking(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Returns a function that gives its work to all further requests, as an API that has adapters would."""
    plain = Preparer.prepare

    def ask(work: Work) -> None:
        async def prepare(self: Preparer, call: RequestCall) -> PreparedRequest:
            return await plain(self, replace(call, extras=Extras(work=work)))

        monkeypatch.setattr(Preparer, "prepare", prepare)

    return ask
