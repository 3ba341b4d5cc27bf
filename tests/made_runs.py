"""Run folders written by hand, so that reports can be tested without training."""

from spherenet.runs import RunDirectory


def make_run(path, accuracies, *, operator="cosine", finished=True, k=None, protocols=None):
    """Write a run with these test accuracies, or those of each protocol: {"running": [0.1, 0.2], …}."""
    run = RunDirectory.create(path)
    protocols = protocols or {}
    run.write_config(
        {
            "format": 1,
            "train": {"model": "cnn-9", "operator": operator, "loss": "softmax", "bn_eval": list(protocols) or None},
            "command": ["spherenet", "train", "--output", path.name],
            "versions": {"torch": "2.13.0"},
            "hardware": {"device": "cpu"},
        }
    )
    for index, accuracy in enumerate(accuracies, 1):
        step = 10 * index
        run.metrics.append({"step": step, "split": "train", "loss": 2 / index, "accuracy": accuracy, "seconds": index})
        tests = [{"accuracy": own[index - 1], "protocol": name} for name, own in protocols.items()]
        for test in tests or [{"accuracy": accuracy}]:
            run.metrics.append({"step": step, "split": "test", "loss": 2 / index, **test, "seconds": index})
        if k is not None:
            run.metrics.append({"step": step, "split": "probes", "k": k, "seconds": index})
    if finished:
        run.write_summary(
            {"iterations": 10 * len(accuracies), "parameters": 1234, "seconds": 5.0, "peak_megabytes": 321}
        )
    return path
