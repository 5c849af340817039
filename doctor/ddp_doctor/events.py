"""The events that a process notes, and that the checks read: a TypedDict for each kind."""

from typing import Any, TypedDict

Sums = dict[str, tuple[int, float]]  # by name, a tensor's checksum and its norm


class Event(TypedDict):
    """What each event has: its kind is the name of its class, in small letters."""

    kind: str
    time: float
    step: int  # how many optimizer steps have ended
    here: list | None  # the loader and the pass that have given the last batch


class Place(Event):
    where: str  # the line of the user's program


class Pass(Event):
    """One of a loader's passes. The same loader has the same key on all ranks."""

    key: str
    number: int


class Start(Event):
    """A rank has joined its group, or takes its first step without one."""

    rank: int
    world: int
    told: int  # WORLD_SIZE
    host: str
    pid: int
    cores: float


class Topology(Place):
    """What lets ranks differ on purpose: sharded, averaged, groups, join, hook or compiled."""

    what: str
    name: str


class Failed(Event):
    """A hook of the doctor failed."""

    name: str
    error: str


# --- data
class Loader(Pass):
    """A pass begins."""

    place: str  # where the loader was made
    where: str
    dataset: int
    kinds: list[str]  # the classes of the data set and of the sampler
    size: int | None  # samples of the data set
    length: int | None  # batches
    batch: int | None
    workers: int
    persistent: bool
    streams: bool  # an IterableDataset
    shuffles: bool  # which shuffles in its own code
    distributed: bool
    shuffle: bool
    settable: bool  # a sampler has set_epoch()
    random: bool  # drawn with replacement
    padded: int  # samples that the sampler repeats
    whole: bool  # drop_last
    epoch: int | None  # what set_epoch() has told the sampler or the data set
    numbers: str | None  # the file of the numbers that are drawn
    own: str | None  # the file of the numbers that may be drawn, of a Subset
    prints: dict[str, int]  # checksums of the attributes that hold something for each sample
    orders: dict[str, tuple[int, int, bool]]  # of lists and numberings: what, order, numbers
    states: dict[str, int]  # checksums of the random generators


class Batch(Pass):
    """One of the first batches: its numbers, and a checksum for each part of each sample."""

    numbers: list[int]
    rows: list[list[int]]
    where: str


class Draws(Pass):
    """The generators before and after some samples are made, by a worker or by the rank."""

    worker: int | None
    before: dict[str, int]
    after: dict[str, int]
    seeds: bool  # whether torch's generator was seeded meanwhile


class Trains(Pass):
    """The first backward pass with batches of this pass."""


class End(Pass):
    """A pass has come to its end."""

    count: int  # batches
    sent: int  # forward passes through DDP in which it sends buffers
    buffers: Sums


# --- the model, its loss and its optimizer
class Ddp(Place):
    """A model is wrapped in DDP."""

    device: str
    type: str
    bytes: int
    batchnorm: int  # layers that see one rank's samples alone
    group: int  # the size of its process group


class Forward(Place):
    """A forward pass through DDP in a program without loaders."""

    rows: list[list[int]]


class Loss(Place):
    """A loss of torch.nn.functional."""

    index: int  # within the step
    mean: bool
    count: float | None  # what it is divided by
    plain: bool  # whether that is the number of its targets
    weighted: bool
    pairs: bool  # whether the targets are the samples of the batch themselves
    drawn: int | None  # samples of the batch


class Before(Place):
    """An optimizer is about to step. The lists hold the names of parameters."""

    optimizer: int
    order: int  # the optimizer's step within the pass
    names: list[str]
    weights: Sums
    grads: Sums
    synced: Sums  # the gradients at the end of the last backward pass
    options: list[dict[str, Any]]
    scale: float
    late: list[str]
    moved: list[str]
    outside: list[str]
    idle: list[str]
    lost: list[str]
    asleep: bool
    stale: bool
    incoming: list[tuple[int, float]]  # the index of a loss, and the gradient that it has got
    world: bool  # whether the program divides by a number named like world_size
    divisors: list[float]  # of the loss, last of all
    rooted: bool  # whether the program divides what has the backward pass by such a number
    graph: dict[str, int]  # how many operations of each kind the loss depends on
    sync: list[bool]  # of each forward pass through DDP, whether its gradients are averaged
    backwards: int
    unzeroed: int  # backward passes since the gradients were last zeroed
    batches: int
    states: dict[str, int]
    threads: int


class After(Event):
    """An optimizer has stepped."""

    optimizer: int
    order: int
    weights: Sums


class Later(Place):
    """The first step of a later pass, or the 32nd, 64th, 128th and so on, is about to be made."""

    optimizer: int
    order: int  # 0, or how many steps the optimizer has made
    weights: Sums
    options: list[dict[str, Any]]
    scale: float
    sync: bool  # whether the last forward pass through DDP is averaged


class Clip(Place):
    """Gradients are clipped."""

    norm: float
    scale: float  # of a GradScaler that has not unscaled them yet


class Scheduler(Place):
    """What a scheduler has done so far. The last such event counts."""

    number: int
    name: str
    calls: int
    steps: int  # of its optimizer
    bursts: dict[str, int]  # how often so many calls came between two steps
    total: int | None  # the steps for which it is made


class Resumed(Place):
    """The first step after a scheduler has loaded its state: its rates, and the optimizer's."""

    name: str
    rates: list[float]
    used: list[float]


class Beside(Place):
    """A model beside DDP's is called."""

    name: str
    weights: Sums
    modal: bool  # whether it has layers that differ between training and evaluation
    asleep: bool  # whether these are in eval mode
    frozen: bool  # whether its weights have stayed as they were
    trained: bool  # whether it is called in training


# --- the rest
class Collective(Place):
    """A call of torch.distributed."""

    name: str
    shape: list[int] | None
    value: float | None  # of one number
    backwards: int  # since the last step
    weights: bool  # whether it is called with a parameter


class Save(Place):
    """torch.save."""

    path: str | None
    model: bool
    prefixed: list[str]  # names of weights that begin with DDP's "module."
    optimizer: bool


class Load(Place):
    """torch.load."""

    path: str | None
    device: str | None  # another rank's device, on which it puts tensors


class Crash(Place):
    """An error ends the process."""

    error: str
    doctor: list[str]  # the function of the doctor in which it came up


class Stuck(Event):
    """The doctor has asked a rank where it stands."""

    stack: list[str]


class Pace(Event):
    """The mean of undisturbed steps, in seconds."""

    steps: int
    total: float
    data: float
    update: float
    exposed: float | None  # waiting for an all-reduce, once the backward pass was done
