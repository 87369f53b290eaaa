"""What a worker takes from direct clients, and what it does not."""

import pytest

from trunkline.grant import GrantKeys, sign_grant
from trunkline.status import FORBIDDEN, INVALID_REQUEST, OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import Grant, Submit, WorkerServiceGenerateRequest
from trunkline_worker.front.grants import GrantDesk, UsedGrants

KEY = b"k" * 32
EPOCH = 7
SUBMIT = Submit(request_id="r", prompt_token_ids=[1, 2])


def granted(expires_unix_ms: int = 1000, *, choice: int = 0) -> Grant:
    submit = Submit(request_id="r", prompt_token_ids=[1, 2], choice=choice)
    return sign_grant(KEY, submit, epoch=EPOCH, expires_unix_ms=expires_unix_ms)


def refusal(desk: GrantDesk, request: WorkerServiceGenerateRequest) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        desk.take(request)
    return caught.value


def test_a_worker_with_a_key_takes_grants_and_nothing_else() -> None:
    desk = GrantDesk(GrantKeys(KEY), EPOCH, now_unix_ms=lambda: 0)
    assert desk.take(WorkerServiceGenerateRequest(grant=granted())) == SUBMIT
    for bare in (WorkerServiceGenerateRequest(submit=SUBMIT), WorkerServiceGenerateRequest()):
        assert refusal(desk, bare).reason == FORBIDDEN
    both = WorkerServiceGenerateRequest(grant=granted(choice=1), submit=SUBMIT)
    assert refusal(desk, both).reason == INVALID_REQUEST
    restarted = GrantDesk(GrantKeys(KEY), EPOCH + 1, now_unix_ms=lambda: 0)
    assert "earlier epoch" in refusal(restarted, WorkerServiceGenerateRequest(grant=granted())).message


def test_a_worker_without_a_key_takes_requests_and_no_grants() -> None:
    desk = GrantDesk(GrantKeys(), EPOCH, now_unix_ms=lambda: 0)
    assert desk.take(WorkerServiceGenerateRequest(submit=SUBMIT)) == SUBMIT
    assert "--grant-key" in refusal(desk, WorkerServiceGenerateRequest(grant=granted())).message


def test_a_grant_is_good_once() -> None:
    desk = GrantDesk(GrantKeys(KEY), EPOCH, now_unix_ms=lambda: 0)
    request = WorkerServiceGenerateRequest(grant=granted())
    desk.take(request)
    assert "used already" in refusal(desk, request).message
    desk.take(WorkerServiceGenerateRequest(grant=granted(choice=1)))


def test_used_grants_are_remembered_until_they_expire_in_whatever_order() -> None:
    used = UsedGrants()
    late, soon = granted(2000), granted(1000)
    used.use(late, 0)
    used.use(soon, 0)
    used.use(granted(3000), 1000)
    assert len(used) == 2, "what has expired is refused for that, and need not be remembered"
    with pytest.raises(RequestRefused, match="used already"):
        used.use(late, 1999)


def test_what_cannot_be_remembered_is_not_taken() -> None:
    used = UsedGrants(most=2)
    used.use(granted(1000), 0)
    used.use(granted(2000), 0)
    with pytest.raises(RequestRefused) as caught:
        used.use(granted(3000), 400)
    assert (caught.value.reason, caught.value.retry_delay_ms) == (OVERLOADED, 600)
    used.use(granted(3000), 1000)
