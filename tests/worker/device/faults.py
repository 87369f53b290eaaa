"""What a program can do wrong on a device.

They are no `Exception`: the runner turns an exception of one row into that row's error and goes on.
"""


class DeviceFault(BaseException):
    """A rule of the device was broken."""


class HostSync(DeviceFault):
    """The host waits for the device where it must not."""


class MixedDevices(DeviceFault):
    """One operation has tensors of the host and of the device."""


class UnsafeCopy(DeviceFault):
    """A copy between host and device that blocks, or that may read or write memory that is in use elsewhere."""


class EarlyRead(DeviceFault):
    """The host reads what has not arrived."""


class Race(DeviceFault):
    """A stream uses what another stream may still be using."""


class GraphFault(DeviceFault):
    """A captured graph does not do what the step needs, or may not be captured or replayed like this."""


class LaunchFault(DeviceFault):
    """A kernel's arguments are not what it assumes."""


class OutOfDeviceMemory(DeviceFault):
    """More is allocated than the card has."""
