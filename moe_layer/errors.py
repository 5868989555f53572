"""Every exception that this library raises on purpose.

All are subclasses of :class:`MoELayerError`, raised before anything is launched (except the time-out of a wait), and
their messages name the tensor or setting, the value found and what was expected. This module imports nothing, so every
package may import it.
"""

from __future__ import annotations


class MoELayerError(Exception):
    """Base class of the library's own exceptions."""


class ConfigError(MoELayerError, ValueError):
    """A model config or a layer option that the library cannot serve: unknown model_type, quantization, activation."""


class CheckpointError(MoELayerError, ValueError):
    """A checkpoint that cannot be read safely: missing, extra or mis-shaped tensors, cut files, paths outside it."""


class FormatError(MoELayerError, ValueError):
    """Quantized data that no value can be given to: a missing, NaN or non-positive scale, an unknown format name."""


class UnrepresentableError(FormatError):
    """Weights that mean something, but that a kernel's own layout cannot hold exactly: other code runs them instead."""


class TensorError(MoELayerError, ValueError):
    """A tensor argument of the wrong dtype, shape, device or stride."""


class CapacityError(MoELayerError, ValueError):
    """More tokens, bytes or experts than the communicator was sized for."""


class CommunicationError(MoELayerError, RuntimeError):
    """A communicator used out of order (dispatch twice, combine without dispatch, after destroy), or a peer failed."""


class RankMismatchError(CommunicationError):
    """Ranks of one step disagree about T̂, a payload width, top_k or the expert placement; names ranks and values."""


class CommunicationTimeoutError(CommunicationError, TimeoutError):
    """A wait that ended without the peer: by its time-out, or because the peer is gone. Names ranks, phase and step."""


class UnsupportedDeviceError(MoELayerError, RuntimeError):
    """The machine cannot run what was asked for; the message says what it could run instead."""
