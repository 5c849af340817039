"""The events that a process notes, and that the checks read: one TypedDict for each kind."""

from typing import Any, TypedDict

Sums = dict[str, tuple[int, float]]  # by name, a tensor's checksum and its norm


class Event(TypedDict):
    """What each event has."""

    kind: str
    time: float
    step: int  # how many optimizer steps have ended
    here: list | None  # the loader and the pass that have given the last batch


class Start(Event):
    """A rank has joined its group, or takes its first step without one."""

    rank: int
    world: int
    told: int  # WORLD_SIZE
    host: str
    pid: int
    cores: float


class Topology(Event):
    """Something by which ranks may differ on purpose. `what` is sharded, groups, or summed."""

    what: str
    name: str
    where: str


class Failed(Event):
    """A hook of the doctor failed."""

    name: str
    error: str


# --- data
class Loader(Event):
    """A pass over a loader begins."""

    key: str  # where the loader was made: it is the same on all ranks
    number: int
    place: str
    where: str
    dataset: int
    kinds: list[str]  # names of the data set's and the sampler's class
    size: int | None  # samples of the data set
    length: int | None  # batches
    batch: int | None
    workers: int
    persistent: bool
    streams: bool  # an IterableDataset
    distributed: bool
    shuffle: bool
    random: bool  # drawn with replacement
    padded: int  # samples that the sampler repeats
    whole: bool  # drop_last
    epoch: int | None  # what set_epoch has said, to the sampler or to the data set
    told: bool  # whether the data set has a set_epoch
    numbers: str | None  # the file with the numbers that are drawn
    maps: bool  # whether the numbers are those of the innermost data set
    own: str | None  # the file with all numbers that the loader may draw
    prints: dict[str, int]  # checksums of the data set's attributes that have its length
    classes: list[str]  # how it numbers its classes
    states: dict[str, int]  # checksums of the random generators


class Batch(Event):
    """One of a pass's first batches, and checksums of its samples: one for each of their parts."""

    key: str
    number: int
    numbers: list[int]
    rows: list[list[int]]
    where: str


class Draws(Event):
    """The first samples are made, by a worker or by the rank itself."""

    key: str
    number: int
    worker: int | None
    before: dict[str, int]  # checksums of the generators
    after: dict[str, int]
    seeds: bool  # whether a generator was seeded meanwhile
    shuffles: bool  # whether something was shuffled meanwhile


class Trains(Event):
    """The first backward pass with batches of this pass."""

    key: str
    number: int


class End(Event):
    """A pass has come to its end."""

    key: str
    number: int
    count: int  # batches
    samples: int
    wrapper: int  # forward passes through DDP in which buffers are sent
    buffers: Sums


# --- the model, its loss and its optimizer
class Ddp(Event):
    """A model is wrapped in DDP."""

    device: str
    type: str
    bytes: int
    batchnorm: int  # layers that see one rank's samples alone
    where: str


class Forward(Event):
    """A forward pass through DDP in a program without loaders."""

    rows: list[list[int]]
    where: str


class Loss(Event):
    """A loss of torch.nn.functional that is averaged, or summed up."""

    name: str
    mean: bool
    count: float | None  # what it is divided by
    plain: bool  # whether that is the number of its targets
    weighted: bool
    pairs: bool  # whether the targets are the samples of the batch themselves
    drawn: int | None  # samples of the batch
    world: bool  # whether the program divides by a number named like world_size
    where: str


class Before(Event):
    """An optimizer is about to step. The lists hold the names of parameters."""

    optimizer: int
    order: int  # the optimizer's step within the pass
    weights: Sums  # before the first step of a pass
    grads: Sums
    synced: Sums  # the gradients at the end of the last backward pass
    options: list[dict[str, Any]]
    scale: float
    late: list[str]
    moved: list[str]
    outside: list[str]
    idle: list[str]
    lost: list[str]
    sharded: bool
    asleep: bool
    stale: bool
    incoming: list[tuple[str, float]]  # the loss's line, and the gradient that it has got
    graph: dict[str, int]  # operations that the loss depends on
    sync: list[bool]  # of each forward pass through DDP, whether its gradients are averaged
    backwards: int
    unzeroed: int  # backward passes since the gradients were last zeroed
    batches: int
    states: dict[str, int]
    threads: int
    schedule: list[list[float]] | None  # a resumed scheduler's rates, and the optimizer's
    where: str


class After(Event):
    """An optimizer has stepped."""

    optimizer: int
    order: int
    weights: Sums


class Clip(Event):
    """Gradients are clipped."""

    norm: float
    backwards: int
    where: str


class Scheduler(Event):
    """What a scheduler has done so far. The last such event counts."""

    number: int
    name: str
    optimizer: int
    calls: int
    steps: int  # of its optimizer
    bursts: int  # how many calls came between two steps, in most cases
    total: int | None  # T_max or total_steps
    where: str


class Beside(Event):
    """A model beside DDP's that is called."""

    name: str
    weights: Sums
    asleep: bool
    moving: bool  # whether it has weights that change
    modal: bool  # whether it has layers that differ between training and evaluation
    where: str


# --- the rest
class Collective(Event):
    """A call of torch.distributed."""

    name: str
    shape: list[int] | None
    value: float | None  # of one number
    average: bool
    backwards: int
    weights: bool  # whether it is called with a parameter
    where: str


class Save(Event):
    """torch.save."""

    path: str
    model: bool
    prefixed: list[str]  # names of weights that begin with DDP's "module."
    optimizer: bool
    where: str


class Load(Event):
    """torch.load."""

    path: str | None
    device: str | None  # another rank's device, on which it puts tensors
    where: str


class Pace(Event):
    """Seconds of undisturbed steps within a pass."""

    steps: int  # of the optimizer that has made most
    total: float
    data: float
    update: float


class Comm(Event):
    """What DDP's own logger says about an iteration, in seconds."""

    iteration: int
    exposed: float
    synced: int
