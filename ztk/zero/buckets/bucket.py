"""A bucket: the parameters that share one flat buffer. All of it has one dtype."""

from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.exchange import Exchange
from ztk.zero.buckets.gradient import BucketGradient
from ztk.zero.buckets.layout import BucketLayout
from ztk.zero.buckets.piece import Piece
from ztk.zero.buckets.residency import ParameterState, Residency
from ztk.zero.buckets.units import BucketTraits


class Bucket:
    """Parameters of one unit in one flat buffer: its layout, its pieces, and the state of its parameters and gradients.

    pieces: the parts that this rank updates: its shard, or every shard if optimizer states are not sharded.
    comm: the ranks that share the shards. exchange: how shards are sent over it.
    """

    def __init__(
        self,
        traits: BucketTraits,
        *,
        layout: BucketLayout,
        parameters: list[nn.Parameter],
        pieces: list[Piece],
        comm: Comm,
        exchange: Exchange,
        context: ZeroContext,
    ) -> None:
        self.traits, self.layout, self.parameters, self.pieces = traits, layout, parameters, pieces
        self.comm, self.exchange = comm, exchange
        self.residency = Residency(
            parameters,
            traits=traits,
            layout=layout,
            pieces=pieces,
            exchange=exchange,
            store=context.stores.parameters,
            pool=context.gathered,
        )
        self.gradient = BucketGradient(parameters, layout=layout)

    def local_range(self, name: str) -> range:
        """Returns the flat elements of the parameter `name` in this rank's shard."""
        found = [f for f in self.layout.fragments(self.layout.shard(self.comm.rank)) if f.name == name]
        return range(found[0].start, found[0].stop) if found else range(0)

    @property
    def state(self) -> ParameterState:
        """Where the parameters are."""
        return self.residency.state

    @property
    def full(self) -> Tensor | None:
        """The parameters, [size]; None while they are sharded."""
        return self.residency.full

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.layout.size

    @property
    def own_pieces(self) -> list[Piece]:
        """The pieces of this rank's shard."""
        shard = self.layout.shard(self.comm.rank)
        return [piece for piece in self.pieces if piece.start in shard]

    def own(self, full: Tensor) -> Tensor:
        """This rank's shard [shard_size] of a buffer [size]: a view."""
        shard = self.layout.shard(self.comm.rank)
        return full[shard.start : shard.stop]

    def share_parameters(self) -> None:
        """Gathers the parameters of a bucket that is never sharded, after every rank has changed its own. A collective call."""
        if not self.traits.shards_parameters:
            self.comm.all_gather(self.full, label=self.traits.name).wait()
