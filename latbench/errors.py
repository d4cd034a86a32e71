"""Expected failures, each with the exit code that tells a script what happened.

Exit codes: 0 ok, 1 promise missed or regression, 2 usage, 3 environment unusable, 4 incomplete but resumable, 5 bad
data. The command line prints `latbench: <message>` and exits with the code.
"""


class LatbenchError(Exception):
    """An expected failure. Its one-line message says what happened, why, and what to do."""

    exit_code = 1


class PromiseMissed(LatbenchError):
    """A measured result misses its promise, or a target is out of reach."""

    exit_code = 1


class UsageError(LatbenchError):
    """A wrong request: an unknown name, an impossible option."""

    exit_code = 2


class EnvironmentUnusable(LatbenchError):
    """A machine that cannot do what is asked: no such device, a missing library, a full disk."""

    exit_code = 3


class Incomplete(LatbenchError):
    """A stop before the end. Everything finished is saved, and the same command continues from there."""

    exit_code = 4


class BadData(LatbenchError):
    """A file that is missing, foreign, damaged or of another version."""

    exit_code = 5
