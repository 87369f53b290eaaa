"""What the bytes of a KV block mean. Pure."""

from dataclasses import dataclass

# The order of a block's bytes: [num_layers, 2 (keys, values), block_size, num_kv_heads, head_dim]. Raise it when that
# changes.
LAYOUT = 1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}  # by dtype


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block moves as a unit, between tiers and workers, and only to where blocks have an equal format."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str
    layout: int = LAYOUT

    @property
    def num_bytes(self) -> int:
        """Bytes of one block: keys and values of its tokens in all layers."""
        return self.token_bytes * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]
