"""What each Triton kernel assumes of its arguments: types, sizes, and the numbers that the host puts into its tables.

A contract is named like its kernel. It is checked at every launch, and knows no more than the kernel's own comments.
"""

from collections.abc import Callable

from tests.worker.device import attention_contracts, product_contracts, row_contracts, sampling_contracts
from tests.worker.device.launches import Launch

Contract = Callable[[Launch], None]
ROOMS = (row_contracts, attention_contracts, product_contracts, sampling_contracts)
CONTRACTS: dict[str, Contract] = {contract.__name__: contract for room in ROOMS for contract in room.CONTRACTS}
# Kernels of which a captured graph may launch more programs than a step needs: they look at the step's own numbers.
MAY_EXCEED = frozenset({"_step_inputs"})


def check(launch: Launch) -> None:
    """Raises LaunchFault."""
    contract = CONTRACTS.get(launch.name)
    if contract is None:
        raise launch.fault("this kernel has no contract")
    contract(launch)
