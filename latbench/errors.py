"""What a user did, said in one line, with the exit code that tells a script the same thing.

Exit codes: 0 ok, 1 promise missed or regression, 2 usage, 3 environment unusable, 4 incomplete but resumable,
5 bad data. Every expected failure is one of these; the command line prints `latbench: <sentence>` and exits.
"""


class LatbenchError(Exception):
    """An expected failure: what happened, why, what to do, in one line."""

    exit_code = 1


class PromiseMissed(LatbenchError):
    """The measured result is not what was promised, or a target is out of reach."""

    exit_code = 1


class UsageError(LatbenchError):
    """The request itself is wrong: an unknown name, an impossible option."""

    exit_code = 2


class EnvironmentUnusable(LatbenchError):
    """This machine cannot do it: no such device, a missing library, a full disk."""

    exit_code = 3


class Incomplete(LatbenchError):
    """Stopped before the end; nothing finished is lost, and the same command goes on from there."""

    exit_code = 4


class BadData(LatbenchError):
    """A file is missing, foreign, truncated or of another version."""

    exit_code = 5
