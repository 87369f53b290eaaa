"""The tiling of a matrix product."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulTiling:
    """The size of the tile that a program computes, and the resources that it uses for it."""

    rows: int
    columns: int
    inner: int  # elements of the inner dimension that are multiplied at a time
    warps: int
    stages: int  # of the pipeline of loads
