"""Mappings of losses, of which some entries are only reported."""

from support.ranks.training import of_tokens, pair


def right(outputs, targets):
    return ((outputs.argmax(-1) == targets) & (targets != -100)).double()


def metrics(outputs, targets):
    counts = (targets != -100).sum()
    return {
        "accuracy": right(outputs, targets).sum() / counts,
        "as pair": (right(outputs, targets).sum(), counts),
        "each": right(outputs, targets).sum(1),
    }


def total(outputs, targets):
    return {"loss": of_tokens(outputs, targets), **metrics(outputs, targets)}


def detached(outputs, targets):
    return {"ce": of_tokens(outputs, targets), **metrics(outputs, targets)}


def total_pair(outputs, targets):
    return {"loss": pair(outputs, targets), **metrics(outputs, targets)}


def several(outputs, targets):
    found = metrics(outputs, targets)
    return {"tokens": of_tokens(outputs, targets), "size": outputs.pow(2).mean(), "as pair": found["as pair"]}


LOSSES = {"total": total, "detached": detached, "total_pair": total_pair, "several": several}
