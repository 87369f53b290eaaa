"""How the hidden states of a prompt become one output, as data."""

from dataclasses import dataclass
from enum import Enum

ACTIVATIONS = ("identity", "tanh", "gelu", "relu")  # of projections


class Pooling(Enum):
    """Which state, or what of all states, stands for a prompt."""

    CLS = "cls"  # the state of the first token
    LAST = "lasttoken"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"  # the sum, divided by the square root of the number of tokens
    MAX = "max"  # of each component


class Activation(Enum):
    """What a front does with the values of a head; names are those of trunkline.v1.PoolingActivation."""

    NONE = "POOLING_ACTIVATION_NONE"
    NORMALIZE = "POOLING_ACTIVATION_NORMALIZE"
    SIGMOID = "POOLING_ACTIVATION_SIGMOID"
    SOFTMAX = "POOLING_ACTIVATION_SOFTMAX"


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """A matrix product of the pooled state, with what follows it. Names of tensors end with .weight and .bias."""

    name: str
    rows: int
    inner: int
    bias: bool
    activation: str = "identity"  # one of ACTIVATIONS
    norm: str | None = None  # a layer norm of the result
    norm_eps: float = 1e-5
    norm_bias: bool = False
    folder: str | None = None  # in the model's directory, with a file of its own; None: among the model's tensors


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """A score that is read from logits: how much more likely one token is than another."""

    yes: int
    no: int | None  # None: the logit of `yes` alone


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """All that a checkpoint says of its outputs and inputs."""

    pooling: Pooling
    head: tuple[ProjectionSpec, ...] | AnswerTokens
    activation: Activation
    labels: tuple[str, ...] = ()  # of a score; a model of vectors has none
    offered_dimensions: tuple[int, ...] = ()  # that a vector may be cut to
    any_dimensions: bool = False
    prompts: tuple[tuple[str, str], ...] = ()  # name and text
    default_prompt: str = ""
    most_tokens: int | None = None  # of an input; None: the model's context
    pair_template: str = ""
    default_instruction: str = ""

    def dimensions(self, hidden: int) -> int:
        """Returns the components of a vector. hidden: those of a state"""
        return self.head[-1].rows if isinstance(self.head, tuple) and self.head else hidden
