"""The verb `demo`: a local web page that shows what a network computes for an image."""

from __future__ import annotations

from argparse import Namespace

from spherenet.cli.option_types import add_max_megapixels, add_option
from spherenet.cli.options import Parser
from spherenet.cli.output import print_message, warn

__all__ = ["demo_parser", "run_demo"]


def demo_parser() -> Parser:
    """Return the parser of `spherenet demo`."""
    parser = Parser(
        "demo",
        "Start a web page on this machine that classifies images that you drop on it: probabilities, the\n"
        "angle between the feature and each class, and the patches with the largest responses. Sliders\n"
        "change the light of the image. Without MODEL, the SphereNet included in the package is used. The\n"
        "page is not reachable from other machines, and images stay on this one. Ctrl-C ends it.",
        examples="""\
  spherenet demo
  spherenet demo runs/mnist5k-cnn-3-cosine
  spherenet demo runs/sphere --compare runs/cnn
  spherenet demo exported-model --port 8080 --no-browser""",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of a run or an exported model")
    parser.add_argument("--compare", metavar="MODEL", help="a second model with the same classes, shown beside")
    text = "port of the page; 0 for a free one"
    add_option(parser, "--port", type=int, default=0, at_least=0, at_most=65535, help=text)
    add_max_megapixels(parser)
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    return parser


def run_demo(arguments: Namespace) -> None:
    """Serve the page until Ctrl-C."""
    import threading
    import webbrowser
    from pathlib import Path

    from spherenet.data import pixel_limit
    from spherenet.demo import Analyzer, DemoServer
    from spherenet.errors import RunError
    from spherenet.export import shipped_model
    from spherenet.training.saved_runs import load_predictor

    folder = Path(arguments.model or shipped_model())
    max_pixels, analyzers = pixel_limit(arguments.max_megapixels), []
    for path in (folder, arguments.compare):
        predictor = None if path is None else load_predictor(Path(path))
        for message in () if predictor is None else predictor.warnings:
            warn(message)
        analyzers.append(None if predictor is None else Analyzer(predictor, max_pixels=max_pixels))
    analyzer, compared = analyzers
    assert analyzer is not None
    name = Path(arguments.compare or "").resolve().name
    try:
        server = DemoServer(analyzer, folder.resolve().name, arguments.port, compared=compared, compared_title=name)
    except OSError as error:
        raise RunError(f"port {arguments.port} cannot be used: {error.strerror or error}.") from None
    with server:
        print(f"{server.address}  (Ctrl-C ends it)", flush=True)
        if not arguments.no_browser:
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            print_message("spherenet demo: ended.")
