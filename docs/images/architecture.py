"""Draw `architecture.svg`: the packages and the direction of imports, from the import rules in pyproject.toml.

python docs/images/architecture.py [FILE]
"""

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SUMMARIES = {
    "cli": "commands",
    "bench": "timing",
    "demo": "local page",
    "estimators": "scikit-learn",
    "theory": "numerical experiments",
    "report": "tables and pages",
    "experiments": "the paper's runs",
    "training": "config, trainer, evaluation, distributed, saved runs",
    "export": "saved models, torch.export, TorchScript, ONNX",
    "convert": "any network to a SphereNet and back",
    "models": "networks",
    "regularizers": "penalties, diagnostics",
    "optim": "groups, norms",
    "layers": "modules, AngularHead",
    "losses": "logits, margins",
    "functional": "public functions",
    "transposed": "transposed SphereConv",
    "arguments": "operator, k, center",
    "kernels": "fast implementations, dispatch",
    "ops": "norms, geometry, plain formulas",
    "angles": "one class per angle function g",
    "magnitudes": "functions h of the norm",
    "data": "data sets",
    "runs": "run directory",
    "metrics": "verification, retrieval",
    "caches": "folders in the user's cache",
    "files": "atomic writes",
    "validation": "argument checks",
    "text": "messages",
    "errors": "exceptions",
}
WIDTH, ROW, GAP, LEFT, TOP = 900, 46, 10, 40, 14


def import_layers() -> list[list[str]]:
    """Return the packages of each layer, the importing ones first."""
    # tomllib is not available in Python 3.10.
    block = re.search(r"^layers = \[\n(.*?)^\]", PROJECT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert block is not None
    layers = re.findall(r'"([^"]+)"', block[1])
    rows = [layer.replace("|", ":").split(":") for layer in layers]
    return [[name.strip(" ()").removeprefix("spherenet.") for name in names] for names in rows]


def box(x: float, y: float, width: float, name: str) -> str:
    """Return the box of one package."""
    center = x + width / 2
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}" rx="6" fill="#eaf1f8" stroke="#4477aa"/>'
        f'<text x="{center:.1f}" y="{y + 19:.1f}" font-size="15" font-weight="600">{escape(name)}</text>'
        f'<text x="{center:.1f}" y="{y + 36:.1f}" font-size="11.5" fill="#444">{escape(SUMMARIES.get(name, ""))}</text>'
    )


def main(path: Path) -> None:
    """Write the figure."""
    layers = import_layers()
    height = TOP + len(layers) * (ROW + GAP) + TOP
    boxes = []
    for row, names in enumerate(layers):
        width = (WIDTH - LEFT - GAP - GAP * (len(names) - 1)) / len(names)
        boxes += [box(LEFT + i * (width + GAP), TOP + row * (ROW + GAP), width, name) for i, name in enumerate(names)]
    arrow = (
        f'<path d="M18 {TOP} V{height - TOP - 16}" stroke="#888" stroke-width="2" fill="none"/>'
        f'<path d="M12 {height - TOP - 18} L18 {height - TOP - 6} L24 {height - TOP - 18} Z" fill="#888"/>'
        f'<text font-size="12" fill="#666" transform="translate(12 {height / 2:.1f}) rotate(-90)">imports</text>'
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" text-anchor="middle" role="img"><title>Packages; imports point down</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{arrow}\n' + "\n".join(boxes) + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
