"""Write examples/data/sums.parquet: 100 chats, one per row, in the column ``messages``.

    python examples/data/make_chat.py

The file shows the form that ``data.format=chat`` expects of your own parquet files.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet

from everstep.data.arithmetic import chats

if __name__ == "__main__":
    path = Path(__file__).parent / "sums.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats()), path)
    print(path)
