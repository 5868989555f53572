"""Expert-parallel all-to-all: one interface, several transports.

``base`` states the contract, ``channel`` owns what the layers of a model share (group, buffers, the pair in flight),
``placement`` says which rank holds which expert; ``loopback`` (one rank) and ``collective`` (torch.distributed) are the
portable transports.
"""

from moe_layer.comm.base import DispatchResult, ExpertParallelComm
from moe_layer.comm.channel import Channel, create_channel
from moe_layer.comm.placement import ExpertPlacement

__all__ = ["Channel", "DispatchResult", "ExpertParallelComm", "ExpertPlacement", "create_channel"]
