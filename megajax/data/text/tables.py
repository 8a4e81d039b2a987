"""The texts of a column of a CSV file."""

import csv
from collections.abc import Iterator
from typing import IO

from megajax.core.errors import UserError
from megajax.data.text import streams
from megajax.host import reading


def texts(content: IO[bytes], where: str, key: str, most: int) -> Iterator[str | ValueError]:
    """The texts of the column `key`, which the first row names, or what is wrong with a row; raises `Undecodable` where
    the file is not CSV. `where` is what error messages call it."""
    csv.field_size_limit(most)
    rows = csv.reader(_lines(content, most), strict=True)
    try:
        header = next(rows, [])
        if key not in header:
            names = ", ".join(f'"{name}"' for name in header[:20])
            raise UserError(f'{where} has no column "{key}"; valid: one of {names or "several, in its first row"}')
        column = header.index(key)
        for row in rows:
            if len(row) in (0, len(header)):
                yield row[column] if row else ""
            else:
                yield ValueError(f"{len(row)} columns; valid: {len(header)}, as in the first row")
    except UnicodeDecodeError as error:
        raise streams.Undecodable(f"line {rows.line_num + 1} is not UTF-8: {error.reason}") from None
    except csv.Error as error:
        raise streams.Undecodable(f"not CSV: {error} at line {rows.line_num}") from None


def _lines(content: IO[bytes], most: int) -> Iterator[str]:
    """Lines, which end as in the file, because quoted texts contain them."""
    for number, line in enumerate(reading.lines(content, most)):
        text = streams.checked(line.decode())
        yield text if number else text.removeprefix("\ufeff")
