"""The arithmetic of a training step: its matrix products, forward and backward, on one device.

Multiplications and additions are counted each, of matrix products only. What is computed again is not counted.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixProduct:
    """`count` times a batch of products [rows, inner] · [inner, columns]."""

    name: str
    count: int
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Of all of them."""
        return 2 * self.count * self.batch * self.rows * self.inner * self.columns
