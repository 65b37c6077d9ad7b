"""Every error and warning class of the library, in one small tree.

All errors derive from `KnapFormerError`, so that one `except` catches them, and each also derives from the built-in
that fits its kind, so that code which knows nothing of this library still catches it in the usual way:

    KnapFormerError
    |- SpecError(ValueError)                  a string or configuration that cannot be read
    |- PlanError(ValueError)                  a request that no plan can serve
    |- CalibrationError(ValueError)           measurements that no cost model fits
    |- DataError(ValueError)                  a manifest, trace, image or clip that cannot be used
    |- BackendUnavailableError(ImportError)   an optional package or kernel that is not there
    |- RankMismatchError(RuntimeError)        ranks that disagree
    |- PlanInvariantError(AssertionError)     a plan that breaks a promise: a defect, of ours or of a custom planner
    `- KernelConformanceError(AssertionError) an attention kernel that breaks its contract

A message says what is wrong, the value, what is allowed, and what to do. The module imports nothing.
"""

__all__ = [
    "BackendUnavailableError",
    "CalibrationError",
    "DataError",
    "KernelConformanceError",
    "KnapFormerError",
    "KnapFormerWarning",
    "PlanError",
    "PlanInvariantError",
    "RankMismatchError",
    "SpecError",
]


class KnapFormerError(Exception):
    """Base of all errors that this library raises on purpose. Catch it to handle any of them."""


class SpecError(KnapFormerError, ValueError):
    """A bag spec, data code, cluster or configuration cannot be read. The message names the column or field."""


class PlanError(KnapFormerError, ValueError):
    """No plan can serve the request, for example: lengths that are not positive, a memory limit that nothing meets."""


class CalibrationError(KnapFormerError, ValueError):
    """The measurements do not determine a cost model, or the fitted prices make no sense (negative, not finite)."""


class DataError(KnapFormerError, ValueError):
    """A trace, manifest, image or clip cannot be used. The message names the file, and the entry where there is one."""


class BackendUnavailableError(KnapFormerError, ImportError):
    """An optional package, device or attention kernel is needed but not available. The message says how to get it."""


class RankMismatchError(KnapFormerError, RuntimeError):
    """Ranks disagree, or one of them gave input that cannot be used. Every rank raises the same error."""


class PlanInvariantError(KnapFormerError, AssertionError):
    """A placement breaks a promise, such as token conservation. The defect is in a planner, not in the user's input."""


class KernelConformanceError(KnapFormerError, AssertionError):
    """An attention kernel breaks its contract. The message lists what differs, by how much, and what is allowed."""


class KnapFormerWarning(UserWarning):
    """Something the user set is ignored or has a cost they may not expect. Issued once for each cause."""
