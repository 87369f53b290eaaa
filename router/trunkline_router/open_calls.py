"""How many calls there may be: on each account, and in all."""

from collections import Counter

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused

# A call takes some 40 KiB before its message is read, and with a full window 75.
MAX_CALLS, MAX_ACCOUNT_CALLS = 8192, 4096
# Health checks, reflection and other calls that are no requests: of a connection, and of all.
MAX_OTHER_CALLS, MAX_CONNECTION_OTHER_CALLS = 2048, 64
RETRY_MS = 1000


class OpenCalls:
    """Counts the calls that are open, by account."""

    def __init__(self, most: int = MAX_CALLS, most_of_account: int = MAX_ACCOUNT_CALLS) -> None:
        self._most, self._most_of_account = most, most_of_account
        self._of_account: Counter[str] = Counter()
        self._num_open = 0

    def open(self, account: str) -> None:
        """One more; close() has to follow. Raises RequestRefused (OVERLOADED) where there are too many."""
        if self._num_open >= self._most or self._of_account[account] >= self._most_of_account:
            message = "too many calls are open already"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)
        self._num_open += 1
        self._of_account[account] += 1

    def close(self, account: str) -> None:
        self._num_open -= 1
        self._of_account[account] -= 1
        if not self._of_account[account]:
            del self._of_account[account]
