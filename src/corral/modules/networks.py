"""Building blocks of the default module: MLPs, convolutions and an encoder for any supported observation space."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.nn import functional

from corral.core.settings import PositiveInt, import_path
from corral.core.spaces import blank_array, space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError, nearest
from corral.modules.pixels import Number, find_scaling

FloatArray = NDArray[np.float32]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": nn.LeakyReLU,
    "linear": nn.Identity,
}

# Haarnoja et al. 2018 (arXiv:1801.01290) keep the log standard deviation in this range.
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0

LayerT = TypeVar("LayerT", bound="nn.Linear | nn.Conv2d")
MakeLinear = Callable[[int, int, float], nn.Module]
"""Makes a linear layer, given the numbers of inputs and outputs, and the gain with which its weights may start."""

INITIALIZERS = tuple(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_"))
OF_TORCH = "torch"
"""Name of the initializer that leaves the weights with which torch makes a layer."""


def _find_initializer(value: Any) -> Any:
    if value is None or callable(value) or value == OF_TORCH:
        return value
    if not isinstance(value, str):
        raise ValueError("it must be the name of a function of torch.nn.init, 'torch', or a function of a tensor")
    if ":" in value:
        return import_path(value)
    name = value.removesuffix("_") + "_"
    if name not in INITIALIZERS:
        raise ValueError(f"torch.nn.init has no {name!r}. {nearest(name, INITIALIZERS)}")
    return getattr(nn.init, name)


Initializer = Annotated[Any, BeforeValidator(_find_initializer)]
"""A function that sets a tensor in place, its import path, the name of one of `torch.nn.init`, or `"torch"`."""


def _full_filters(filters: Any) -> Any:
    """Return filters with pairs of numbers and a padding; what is no filter stays, and is refused later."""
    return [_full_filter(each) for each in filters] if isinstance(filters, (list, tuple)) else filters


def _full_filter(given: Any) -> Any:
    if not isinstance(given, (list, tuple)) or len(given) not in (3, 4):
        return given
    pairs = [(number, number) if isinstance(number, int) else number for number in given[1:3]]
    return (given[0], *pairs, *(given[3:] or ["valid"]))


Pair = tuple[PositiveInt, PositiveInt]
# (out_channels, kernel size, stride, padding) per layer; sizes and strides are (height, width)
ConvFilters = Annotated[
    Sequence[tuple[PositiveInt, Pair, Pair, Literal["valid", "same"]]],
    BeforeValidator(_full_filters),
    Field(min_length=1),
]

# Filters by the shorter side of the image in pixels: Mnih et al. 2015 (doi:10.1038/nature14236) for large frames,
# smaller strided layers for medium ones, and Young and Tian 2019 (arXiv:1903.03176) for boards as small as MinAtar's.
MIN_IMAGE_PIXELS = 8
DEFAULT_FILTERS: tuple[tuple[int, ConvFilters], ...] = (
    (64, _full_filters([(32, 8, 4), (64, 4, 2), (64, 3, 1)])),
    (16, _full_filters([(16, 3, 2), (32, 3, 2), (32, 3, 1)])),
    (MIN_IMAGE_PIXELS, _full_filters([(16, 3, 1)])),
)


class EncoderConfig(Protocol):
    """The settings of `corral.modules.module.NetworkConfig` that an encoder reads."""

    conv_filters: ConvFilters | None
    conv_activation: str
    conv_features: int | None
    channel_axis: Literal["first", "last"] | None
    image_scale: float | Literal["auto"]
    features_extractor: Any
    features_extractor_config: dict[str, Any]

    def make_layers(self, num_inputs: int, hiddens: Sequence[int]) -> nn.Sequential:
        """Return the hidden layers."""


def orthogonal(layer: LayerT, gain: float) -> LayerT:
    """Initialise a layer orthogonally with zero bias (Andrychowicz et al. 2021, arXiv:2006.05990) and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def linear(num_inputs: int, num_outputs: int, gain: float, *, config: Any, part: str) -> nn.Linear:
    """Return a linear layer of a part, initialised as a config says; see `initialize`."""
    return initialize(nn.Linear(num_inputs, num_outputs), gain, config, part)


def orthogonal_linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    """Return a linear layer with orthogonal weights and zero bias."""
    return orthogonal(nn.Linear(num_inputs, num_outputs), gain)


def initialize(layer: LayerT, gain: float, config: Any, part: str) -> LayerT:
    """Initialise a layer of a part, `"fcnet"`, `"conv"` or `"head"`, as a config says, and return it.

    Weights are orthogonal and biases zero where the config gives no initializer.
    """
    set_weights(layer.weight, config, part, "kernel", lambda weight: nn.init.orthogonal_(weight, gain))
    if layer.bias is not None:
        set_weights(layer.bias, config, part, "bias", nn.init.zeros_)
    return layer


def set_weights(weights: Tensor, config: Any, part: str, kind: str, default: Callable[[Tensor], Any]) -> None:
    """Initialise the weights of kind `"kernel"` or `"bias"` with the config's function, or with the default.

    Raises:
        ConfigError: The function raises.
    """
    name = f"{part}_{kind}_initializer"
    function, settings = getattr(config, name), getattr(config, f"{name}_kwargs")
    if function is None:
        default(weights)
    elif function != OF_TORCH:
        try:
            with torch.no_grad():
                function(weights, **settings)
        except Exception as error:
            raise ConfigError(
                f"model_config: {name} raised {type(error).__name__} for weights {list(weights.shape)}, with "
                f"{name}_kwargs={settings!r:.100}: {error}"
            ) from error


def mlp(
    num_inputs: int,
    hiddens: Sequence[int],
    activation: str,
    *,
    layernorm: bool = False,
    make_linear: MakeLinear = orthogonal_linear,
) -> nn.Sequential:
    """Return `len(hiddens)` linear layers, each followed by the activation; empty hiddens give the identity.

    With `layernorm`, a layer normalisation is between each layer and its activation.
    """
    layers: list[nn.Module] = []
    for width in hiddens:
        layers.append(make_linear(num_inputs, width, math.sqrt(2)))
        layers += [LayerNorm(width)] * layernorm
        layers.append(ACTIVATIONS[activation]())
        num_inputs = width
    return nn.Sequential(*layers)


class LayerNorm(nn.LayerNorm):
    """A layer normalisation of torch (Ba et al. 2016, arXiv:1607.06450) with a form in NumPy."""

    def numpy_form(self) -> Callable[[FloatArray], FloatArray]:
        """Return the layer as a function of an array; see `corral.modules.inference`."""
        (gain, shift), epsilon = arrays_of(self), self.eps

        def norm(x: FloatArray) -> FloatArray:
            normal, _ = normalize_rows(x, epsilon)
            normal *= gain
            normal += shift
            return normal

        return norm


def normalize_rows(x: FloatArray, epsilon: float) -> tuple[FloatArray, FloatArray]:
    """Return rows `[B, n]` with mean 0 and variance 1, a new array, and by what they were divided, `[B, 1]`."""
    mean = np.add.reduce(x, -1, keepdims=True)
    mean *= 1 / x.shape[-1]
    found: FloatArray = x - mean
    deviations: FloatArray = np.einsum("ij,ij->i", found, found)[:, None]
    deviations *= 1 / x.shape[-1]
    deviations += epsilon
    found /= np.sqrt(deviations, out=deviations)
    return found, deviations


def arrays_of(layer: Any) -> tuple[FloatArray, FloatArray]:
    """Return the weight, `[in, out]` or `[n]`, and the bias, as views on the memory of the parameters."""
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


def is_image(space: spaces.Space[Any], config: EncoderConfig | None = None) -> bool:
    """Return whether a space holds images: a Box of rank 3 or 4, at least 8 pixels high and wide.

    With filters in the config, a smaller Box of rank 3 or 4 is an image too if the filters fit. A Box of rank 2 is a
    grey image without an axis of channels if it holds uint8 up to 255.
    """
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        return False
    if len(space.shape) == 2 and not (space.dtype == np.uint8 and space.high.max(initial=0) == 255):
        return False  # a table of numbers
    rows = first_pixel_axis(space, None if config is None else config.channel_axis)
    height, width = space.shape[rows : rows + 2]
    if min(height, width) >= MIN_IMAGE_PIXELS:
        return True
    filters = None if config is None else config.conv_filters
    return filters is not None and len(space.shape) > 2 and min(_size_after(height, width, filters)) >= 1


def has_image(space: spaces.Space[Any], config: EncoderConfig | None = None) -> bool:
    """Return whether a part of a (nested) space holds images; see `is_image`."""
    return any(is_image(leaf, config) for leaf in leaves(space_tree(space)))


def first_pixel_axis(space: spaces.Box, channel_axis: Literal["first", "last"] | None = None) -> int:
    """Return the axis of the height, which the axis of the width follows.

    Without a setting they are the only pair of adjacent axes of equal size, as in boards `[8, 8, 111]`, if it has as
    many pixels as an image; otherwise the pair with the most entries.
    """
    shape = space.shape
    if channel_axis is not None:
        return len(shape) - (3 if channel_axis == "last" and len(shape) > 2 else 2)
    pairs = range(len(shape) - 1)
    squares = [axis for axis in pairs if shape[axis] == shape[axis + 1] >= MIN_IMAGE_PIXELS]
    return squares[0] if len(squares) == 1 else max(pairs, key=lambda axis: shape[axis] * shape[axis + 1])


def _size_after(height: int, width: int, filters: ConvFilters) -> tuple[int, int]:
    """Return height and width after convolutions; less than 1 where a filter is larger than what it is given."""
    size = [height, width]
    for _, kernel, stride, padding in filters:
        for axis in range(2):
            room = size[axis] - (1 if padding == "same" else kernel[axis])
            size[axis] = room // stride[axis] + 1
    return size[0], size[1]


def _same_padding(size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the zeros left, right, above and below with which a convolution gives ceil(size / stride) outputs.

    Where their number is odd, the additional one is right or below, as in TensorFlow.
    """
    added = [
        max(0, (-(-pixels // step) - 1) * step + width - pixels)
        for pixels, width, step in zip(size, kernel, stride, strict=True)
    ]
    (above, left), (below, right) = [n // 2 for n in added], [n - n // 2 for n in added]
    return left, right, above, below


class ImageEncoder(nn.Module):
    """Convolutions over images and a linear layer after them, as in Mnih et al. 2015: `[B, ...]` to `[B, num_outputs]`.

    One pair of adjacent axes holds the pixels, see `first_pixel_axis`. All other axes are channels: colours, stacked
    frames, or both, as in `[B, frames, H, W, 3]`; `[B, H, W]` is one channel. Images are scaled by the bounds of their
    space, see `find_scaling`.
    """

    _scale: Any
    _offset: Any

    def __init__(self, space: spaces.Box, config: EncoderConfig) -> None:
        """Build the layers.

        Raises:
            ConfigError: The filters shrink the image to nothing, or it cannot be scaled.
        """
        super().__init__()
        rows = first_pixel_axis(space, config.channel_axis)
        height, width = space.shape[rows : rows + 2]
        others = [axis for axis in range(len(space.shape)) if axis not in (rows, rows + 1)]
        self._axes = [0, *(axis + 1 for axis in (*others, rows, rows + 1))]  # batch, channels, pixels
        self._shape = (-1, math.prod(space.shape) // (height * width), height, width)
        self.scaling = find_scaling(space, config.image_scale)
        self.is_wide = config.image_scale == "auto" and self.scaling.is_wide
        self.description = (
            f"images {list(space.shape)}: {height} x {width} pixels, {self._shape[1]} channels, {self.scaling}"
        )
        self._keep("_scale", self.scaling.scale)
        self._keep("_offset", self.scaling.offset)
        self._has_offset = bool(np.any(self.scaling.offset))
        filters = config.conv_filters or next(
            choice for pixels, choice in DEFAULT_FILTERS if min(height, width) >= pixels
        )
        if min(_size_after(height, width, filters)) < 1:
            raise ConfigError(f"conv_filters {list(filters)} shrink images of {space.shape} to nothing.")
        layers: list[nn.Module] = []
        channels = self._shape[1]
        for index, (out_channels, kernel, stride, padding) in enumerate(filters):
            if padding == "same":
                layers.append(nn.ZeroPad2d(_same_padding((height, width), kernel, stride)))
            conv = nn.Conv2d(channels, out_channels, kernel, stride)
            layers += [initialize(conv, math.sqrt(2), config, "conv"), ACTIVATIONS[config.conv_activation]()]
            height, width = _size_after(height, width, filters[index : index + 1])
            channels = out_channels
        hiddens = [] if config.conv_features is None else [config.conv_features]
        self.num_outputs = hiddens[0] if hiddens else channels * height * width
        make_linear = partial(linear, config=config, part="conv")
        features = mlp(channels * height * width, hiddens, config.conv_activation, make_linear=make_linear)
        self.layers = nn.Sequential(*layers, nn.Flatten(), *features)

    def _keep(self, name: str, numbers: Number) -> None:
        """Keep one number, or the numbers of all entries as a buffer `[channels, height, width]` that is not saved."""
        if isinstance(numbers, float):
            setattr(self, name, numbers)
        else:
            entries = numbers.transpose([axis - 1 for axis in self._axes[1:]]).reshape(self._shape[1:])
            self.register_buffer(name, torch.from_numpy(entries).float(), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """Encode images to `[B, num_outputs]`."""
        images = obs.permute(self._axes)
        images = images.reshape(self._shape) if images.ndim != 4 else images
        # Learning is a quarter faster on CPUs with the channels of a pixel next to each other. `torch.vmap`, by which
        # noise of the weights is computed, does not take `memory_format=torch.channels_last`, which is the same.
        images = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        pixels = images.float()
        if self._has_offset:
            pixels = pixels - self._offset
        features: Tensor = self.layers(pixels * self._scale)
        return features


class OneHot(nn.Module):
    """Encodes Discrete `[B]` and MultiDiscrete `[B, ...]` observations as concatenated one-hot vectors."""

    def __init__(self, sizes: Sequence[int], starts: Sequence[int]) -> None:
        """Take the number of values of each entry, and the smallest value of each."""
        super().__init__()
        self.sizes, self.starts = list(sizes), list(starts)
        self.num_outputs = sum(self.sizes)

    def forward(self, obs: Tensor) -> Tensor:
        """Encode integers to float32 `[B, num_outputs]`."""
        columns = obs.long().reshape(obs.shape[0], -1).unbind(1)
        parts = [
            functional.one_hot(column - start, size)
            for column, size, start in zip(columns, self.sizes, self.starts, strict=True)
        ]
        return torch.cat(parts, -1).float()


class Flat(nn.Module):
    """Flattens numbers of any shape and dtype to float32 `[B, num_outputs]`."""

    def __init__(self, num_outputs: int) -> None:
        """Take the number of entries of one observation."""
        super().__init__()
        self.num_outputs = num_outputs

    def forward(self, obs: Tensor) -> Tensor:
        """Flatten everything but the batch axis."""
        return obs.float() if obs.ndim == 2 else obs.float().reshape(obs.shape[0], -1)


class Encoder(nn.Module):
    """Encodes observations of any supported space: one part per leaf, concatenated, then an MLP.

    A features extractor of the user takes the place of the parts.

    Attributes:
        is_flat: Whether there is one leaf, a Box that is only flattened.
    """

    def __init__(self, space: spaces.Space[Any], hiddens: Sequence[int], config: EncoderConfig) -> None:
        """Build the parts for the leaves of a (nested) space, and an MLP of these hidden layers.

        Raises:
            ConfigError: A leaf is not supported, there are filters and no image that they fit, or the features
                extractor cannot be made, or returns something else than features.
        """
        super().__init__()
        self._space = space_tree(space)
        self.extractor: nn.Module | None = None
        self.parts = nn.ModuleList()
        if config.features_extractor is not None:
            self.extractor, num_inputs = _make_extractor(space, config)
        else:
            _check_image_settings(space, config)
            self.parts.extend(_leaf_encoder(leaf, config) for leaf in leaves(self._space))
            num_inputs = sum(cast(int, part.num_outputs) for part in self.parts)
        self.mlp = config.make_layers(num_inputs, hiddens)
        self.num_outputs = hiddens[-1] if hiddens else num_inputs
        self._is_nested = isinstance(self._space, (dict, tuple))
        self.is_flat = (
            len(self.parts) == 1 and isinstance(self.parts[0], Flat) and isinstance(leaves(self._space)[0], spaces.Box)
        )

    def forward(self, obs: Tree) -> Tensor:
        """Encode a tree of tensors `[B, ...]` to `[B, num_outputs]`."""
        if self.extractor is not None:
            return cast(Tensor, self.mlp(self.extractor(obs)))
        if not self._is_nested:
            return cast(Tensor, self.mlp(self.parts[0](obs)))
        # In the order of the space: the keys of a user's dict may come in any other.
        ordered = leaves(map_tree(lambda _, leaf: leaf, self._space, obs))
        parts = [part(leaf) for part, leaf in zip(self.parts, ordered, strict=True)]
        return cast(Tensor, self.mlp(parts[0] if len(parts) == 1 else torch.cat(parts, -1)))


class LogStdClamp(nn.Module):
    """Clamps the second half of `[B, 2d]`, log standard deviations, to two bounds.

    Clamped entries have no gradient.
    """

    def __init__(self, low: float = MIN_LOG_STD, high: float = MAX_LOG_STD) -> None:
        """Take the bounds."""
        super().__init__()
        self.low, self.high = low, high

    def forward(self, dist_inputs: Tensor) -> Tensor:
        """Return the clamped tensor `[B, 2d]`."""
        mean, log_std = dist_inputs.chunk(2, -1)
        return torch.cat([mean, log_std.clamp(self.low, self.high)], -1)


class LogStdBounds(nn.Module):
    """Keeps the second half of `[B, 2d]`, log standard deviations, between two bounds: `low + (high - low) * sigmoid`.

    Unlike a clamp it has a gradient everywhere, so that no deviation gets stuck at a bound.
    """

    def __init__(self, low: float, high: float) -> None:
        """Take the bounds."""
        super().__init__()
        self.low, self.high = low, high

    def forward(self, dist_inputs: Tensor) -> Tensor:
        """Return the tensor `[B, 2d]` with bounded deviations."""
        mean, unbounded = dist_inputs.chunk(2, -1)
        return torch.cat([mean, self.low + (self.high - self.low) * unbounded.sigmoid()], -1)

    def inverse(self, log_std: float) -> float:
        """Return what becomes a log standard deviation between the bounds."""
        fraction = (log_std - self.low) / (self.high - self.low)
        return math.log(fraction / (1 - fraction))


def _check_image_settings(space: spaces.Space[Any], config: EncoderConfig) -> None:
    """Refuse settings of images for observations without any.

    Raises:
        ConfigError: Names the setting.
    """
    defaults = {"conv_filters": None, "channel_axis": None, "image_scale": "auto"}
    given = [name for name, default in defaults.items() if getattr(config, name) != default]
    if given and not has_image(space, config):
        raise ConfigError(
            f"model_config: {given[0]}={getattr(config, given[0])!r} has no effect, because no part of the "
            f"observations {space} is an image: a Box of rank 3 or 4, or of rank 2 with uint8 up to 255, in which the "
            f"filters fit. Add an axis of one channel to the observations, or leave {given[0]} out."
        )


def _make_extractor(space: spaces.Space[Any], config: EncoderConfig) -> tuple[nn.Module, int]:
    """Return the features extractor of a config, and the number of its features.

    Raises:
        ConfigError: It cannot be made, raises, or returns something else than features `[B, F]`.
    """
    make = config.features_extractor
    name = f"model_config: features_extractor={getattr(make, '__name__', make)}"
    try:
        extractor = make(space, **config.features_extractor_config)
    except Exception as error:
        given = f"(observation_space, **{config.features_extractor_config})"
        raise ConfigError(f"{name} raised {type(error).__name__} when it was called {given}: {error}") from error
    if not isinstance(extractor, nn.Module):
        raise ConfigError(f"{name} returned {type(extractor).__name__}: it must return a torch.nn.Module.")
    blank = map_tree(lambda leaf: torch.from_numpy(blank_array(leaf, 2)), space_tree(space))
    was_training = extractor.training
    try:
        with torch.no_grad():
            features = extractor.eval()(blank)
    except Exception as error:
        raise ConfigError(f"{name} raised {type(error).__name__} for two observations of {space}: {error}") from error
    finally:
        extractor.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2 or not features.is_floating_point():
        found = f"{features.dtype} {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"{name} returned {found} for two observations: it must return features, float32 [2, F].")
    return extractor, features.shape[1]


def _leaf_encoder(space: spaces.Space[Any], config: EncoderConfig) -> nn.Module:
    if isinstance(space, spaces.Box) and is_image(space, config):
        return ImageEncoder(space, config)
    return flat_encoder(space)


def flat_encoder(space: spaces.Space[Any]) -> Flat | OneHot:
    """Return what encodes a part of an observation that is no image as numbers `[B, num_outputs]`.

    Raises:
        ConfigError: The space is not supported.
    """
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return Flat(math.prod(space.shape))
    if isinstance(space, spaces.Discrete):
        return OneHot([int(space.n)], [int(space.start)])
    if isinstance(space, spaces.MultiDiscrete):
        return OneHot(space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist())
    raise ConfigError(
        f"Unsupported observation space {space}: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple "
        "of these spaces, or give a custom module with .rl_module(...)."
    )


def example_obs(space: spaces.Space[Any]) -> Tree:
    """Return two observations of a space, the same at every call, as a tree of tensors `[2, ...]`."""
    space = copy.deepcopy(space)  # drawing changes the generator of a space
    space.seed(0)
    return map_tree(_batch_of, space.sample(), space.sample())


def _batch_of(*draws: Any) -> torch.Tensor:
    rows = np.stack(draws)
    return torch.from_numpy(rows.astype(np.float32) if rows.dtype.kind == "f" else rows)
