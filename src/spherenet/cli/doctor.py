"""`spherenet doctor`: what is whole in a run folder and what is not."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from spherenet.cli.options import Parser
from spherenet.cli.output import print_json
from spherenet.text import plain

EXAMPLES = """\
  spherenet doctor runs/cifar10-cnn-9-sigmoid
  spherenet doctor runs/cifar10-cnn-9-sigmoid --json"""


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "doctor",
        "Read every file of a run, compare checkpoints with their checksums, and say what is whole\n"
        "and what is not. Nothing is changed. Exit code 1 where something is damaged.",
        examples=EXAMPLES,
    )
    made.add_argument("run", metavar="RUN", help="folder of a run")
    made.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return made


def run(arguments: Namespace) -> int:
    """Examine and print."""
    from spherenet.runs.directory import examine

    findings = examine(arguments.run)
    if arguments.json:
        print_json([asdict(finding) for finding in findings])
    else:
        width = max(len(finding.part) for finding in findings)
        for finding in findings:
            print(plain(f"{'ok ' if finding.good else 'BAD'}  {finding.part:<{width}}  {finding.words}"))
    return 0 if all(finding.good for finding in findings) else 1
