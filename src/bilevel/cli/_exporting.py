"""The work of `bilevel export`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import extras
from bilevel.cli import _user_pictures
from bilevel.cli._classification import ClassifyOptions
from bilevel.data.preparation import Preparation
from bilevel.errors import BilevelError
from bilevel.files import write_bytes, write_json
from bilevel.learners import library
from bilevel.learners.base import Learner
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.recognition import adapted, saved_classifier, trained
from bilevel.learners.representation import CENTRE, LENGTH, SHORTEST
from bilevel.models.batch_norm import MEANING, layers, using
from bilevel.source_commit import commit

# The largest allowed difference from the library, relative to the largest number of an output if that is above 1.
TOLERANCE = 1e-4
# The number of random pictures in the comparison, and the most labelled ones.
RANDOM, LABELLED = 6, 32
INPUT, OUTPUTS = (
    "images",
    {
        "features": "the representation of a picture",
        "logits": "scores of the classes, in the order of `classes`",
        "probabilities": "the softmax of logits / temperature",
    },
)
# The first axis of the input may have any length.
BATCH = ({0: torch.export.Dim("batch", min=1)},)
KINDS = {
    "photograph": "The largest centred part with the proportions of the input, scaled to its size.",
    "drawing": "White ink on black, without gray.",
    "gray-drawing": "Light ink on black, in shades of gray.",
}

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class ExportSource:
    """What is exported: a trained model, and its classifier if there are labelled pictures."""

    model: library.TrainedLearner
    preparation: Preparation
    classifier: FewShotClassifier | None
    notes: list[str]

    @property
    def learner(self) -> Learner:
        learner: Learner = self.model.learner if self.classifier is None else self.classifier.learner
        return learner

    @torch.no_grad()
    def outputs(self, images: Tensor) -> Outputs:
        """The outputs of the library, with which the file is compared."""
        learner, classifier = self.learner, self.classifier
        images = images.to(next(iter(learner.lam.values())))
        support = images if classifier is None else classifier.support
        features = learner.representation.sets(learner.lam, support, images, training=False)[1][:, :-1]
        if classifier is None:
            return {"features": features}
        scores = classifier.scores(images)
        return {"features": features, "logits": scores, "probabilities": classifier.predict_proba(images)}


class ExportedModule(nn.Module):
    """The representation and the linear head in torch's own layers, in single precision, for images N×C×H×W.

    Batch norms use fixed statistics: those of the support set, or the running averages.
    """

    centre: Tensor
    length: Tensor
    weight: Tensor
    bias: Tensor

    @torch.no_grad()
    def __init__(self, source: ExportSource) -> None:
        super().__init__()
        learner, classifier = source.learner, source.classifier
        network = copy.deepcopy(learner.representation.module)
        for name, parameter in network.named_parameters():
            parameter.copy_(learner.lam[name])
        norms = layers(network)
        if learner.batch_norm == "support" and norms:
            assert classifier is not None
            if learner.representation.mirror:
                raise BilevelError(
                    "This model has mirror=True with batch norm `support`: pictures and mirror images have different "
                    "statistics, and an exported batch norm has one set of them. Write `bilevel evaluate MODEL "
                    "--no-mirror --save PATH`, and export that."
                )
            with using(norms, "keep"):
                network(classifier.support)
            for name, layer in norms.items():
                if len(layer.kept) != 1:
                    raise BilevelError(
                        f"The batch norm {name} is used {len(layer.kept)} times, with different statistics each time, "
                        "so they cannot be exported. Train a network that uses each batch norm once."
                    )
                mean, variance = layer.kept.pop()
                layer.running_mean.copy_(mean)
                layer.running_var.copy_(variance)
        for layer in norms.values():
            layer.by = "running"
        self.network, self.normalise = network, learner.representation.normalise
        self.mirror = learner.representation.mirror
        if self.normalise:
            self.register_buffer("centre", learner.lam[CENTRE].clone())
            self.register_buffer("length", learner.lam[LENGTH].exp())
        self.classifies = classifier is not None
        if classifier is not None:
            matrix = getattr(classifier.logits, "matrix")  # noqa: B009 (learners with `linear` have it)
            self.register_buffer("weight", matrix[:-1].clone())
            self.register_buffer("bias", matrix[-1].clone())
            self.temperature = classifier.temperature
        self.float().requires_grad_(False).eval()
        self.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.network(images)
        if self.mirror:
            features = (features + self.network(images.flip(-1))) / 2
        if self.normalise:
            centred = features - self.centre
            size = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).clamp(min=SHORTEST)
            features = self.length * centred / size
        if not self.classifies:
            return (features,)
        logits = features @ self.weight + self.bias
        return features, logits, (logits / self.temperature).softmax(1)


def load(spec: str, support: Path | None, options: ClassifyOptions) -> ExportSource:
    """The model, adapted to the labelled pictures if there are any. A model that cannot be exported is refused.

    Args:
        spec: as for `library.find`, or a saved classifier.
        support: a folder with one folder of pictures per class, or None.
        options: the options of `bilevel classify`.
    """
    saved = saved_classifier(spec)
    if saved is not None:
        given = {"support": support, "batch-norm": options.batch_norm, "steps": options.steps, "invert": options.invert}
        given["no-clean"] = None if options.clean else True
        refused = next((name for name, value in given.items() if value is not None), None)
        if refused is not None:
            raise BilevelError(f"{spec} is a saved classifier, which is adapted already. Leave --{refused} out.")
        model, classifier = saved
        _check(classifier.learner, spec, classifies=True, saved=True)
        return ExportSource(model, model.preparation, classifier, [])
    if support is None and options.steps is not None:
        raise BilevelError(
            f"--steps {options.steps} is for a classifier; add --support labelled/, or leave --steps out."
        )
    model = trained(spec, options.batch_norm)
    _check(model.learner, spec, classifies=support is not None)
    preparation = replace(model.preparation, clean=options.clean, invert=options.invert)
    if support is None:
        return ExportSource(model, preparation, None, [])
    files = _user_pictures.find(support, None)
    files, labelled, _, notes = _user_pictures.read(files, preparation, options.strict)
    return ExportSource(model, preparation, adapted(model, labelled.images, files.labels(), options.steps), notes)


def _check(learner: Learner, spec: str, *, classifies: bool, saved: bool = False) -> None:
    """Refuse a learner that cannot be exported, before any work."""
    if not learner.representation.names:
        raise BilevelError(f"{spec} is a learner {learner.name}, which has no network to export. Pass another model.")
    mode, norms = learner.batch_norm, learner.representation.norms
    if norms and mode == "episode":
        why = f"Batch norm `episode` is {MEANING['episode']}: a prediction depends on the other pictures."
        if "support" not in learner.batch_norm_modes:
            raise BilevelError(f"{why} {learner.name} has no other mode, so it cannot be exported. Use it in Python.")
        again = "Save it again: bilevel classify … --batch-norm support --save FILE.safetensors"
        raise BilevelError(f"{why} {again if saved else 'Write --batch-norm support --support labelled/'}.")
    if classifies and not learner.linear:
        advice = " Export the run itself" if saved else " Leave --support out to export the representation"
        condition = ", if it was trained with --batch-norm running" if norms else ""
        raise BilevelError(
            f"The classifier of {learner.name} is not the representation with a linear head, so it cannot be "
            f"exported.{advice}{condition}."
        )
    if norms and mode == "support" and not classifies:
        raise BilevelError(
            f"The batch norms of {spec} use statistics of labelled pictures (mode `support`), and there are none. "
            "Write --support labelled/, or export a model that was trained with --batch-norm running."
        )


def write(source: ExportSource, to: str, file: Path, card: Path) -> dict[str, Any]:
    """Export, compare with the library, then write the file and its card. Returns the contents of the card."""
    module, images = ExportedModule(source), _pictures(source)
    names = list(OUTPUTS) if source.classifier is not None else ["features"]
    with _quiet():
        program = torch.export.export(module, (images[:2],), dynamic_shapes=BATCH)
        for node in program.graph.nodes:  # stack traces contain paths of this machine
            node.meta.pop("stack_trace", None)
        if to == "onnx":
            runtimes = {f"torch {torch.__version__}": _of_torch(program, names)}
            contents = _onnx(program, names)
            if extras.installed("onnxruntime"):
                runtimes[f"onnxruntime {version('onnxruntime')}"] = _of_onnx(contents, names)
        else:
            stream = io.BytesIO()
            torch.export.save(program, stream)
            contents = stream.getvalue()
            runtimes = {f"torch {torch.__version__}": _of_torch(torch.export.load(io.BytesIO(contents)), names)}
        differences = {name: _differences(source, run, images) for name, run in runtimes.items()}
    for runtime, by_output in differences.items():
        for name, difference in by_output.items():
            if not difference <= TOLERANCE:
                raise BilevelError(
                    f"Nothing was written: with {runtime}, {name} differ from this library's by {difference:.2g}, and "
                    f"{TOLERANCE:g} is allowed. Please report this as a bug, and attach the model."
                )
    facts = _card(source, to, file, module, images, differences)
    write_bytes(file, contents)
    write_json(card, facts)
    return facts


def _pictures(source: ExportSource) -> Tensor:
    """The random and labelled pictures of the comparison."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(RANDOM, *source.learner.shape, generator=generator, dtype=torch.float32)
    labelled = [] if source.classifier is None else [source.classifier.support[:LABELLED].cpu().float()]
    return torch.cat([images, *labelled])


def _of_torch(program: torch.export.ExportedProgram, names: list[str]) -> Callable[[Tensor], Outputs]:
    module = program.module()
    return lambda images: dict(zip(names, module(images), strict=True))


def _onnx(program: torch.export.ExportedProgram, names: list[str]) -> bytes:
    made = torch.onnx.export(program, input_names=[INPUT], output_names=names, dynamic_shapes=BATCH, verbose=False)
    assert made is not None
    contents: bytes = made.model_proto.SerializeToString()
    return contents


def _of_onnx(contents: bytes, names: list[str]) -> Callable[[Tensor], Outputs]:
    runtime = extras.load("onnxruntime", extra="export", purpose="Running ONNX")
    session = runtime.InferenceSession(contents, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Outputs:
        outputs = session.run(names, {INPUT: images.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, outputs, strict=True)}

    return run


def _differences(source: ExportSource, run: Callable[[Tensor], Outputs], images: Tensor) -> dict[str, float]:
    """The largest difference of every output, for a batch of all pictures and for a batch of one."""
    largest: dict[str, float] = {}
    for part in (images, images[:1]):
        outputs, expected = run(part), source.outputs(part)
        for name, value in expected.items():
            error = (outputs[name].double() - value.cpu().double()).abs().max() / value.abs().max().clamp(min=1).cpu()
            largest[name] = float(torch.maximum(error, error.new_tensor(largest.get(name, 0.0))))  # keeps a NaN
    return largest


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about its own code and about optional packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _card(
    source: ExportSource,
    to: str,
    file: Path,
    module: ExportedModule,
    images: Tensor,
    differences: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """The inputs and outputs of the file, how pictures are prepared, and which model it was made from."""
    learner, classifier, settings = source.learner, source.classifier, source.model.settings
    mode = learner.batch_norm if learner.representation.norms else None
    shapes = {name: list(value.shape[1:]) for name, value in source.outputs(images[:1]).items()}
    channels, height, width = learner.shape
    return {
        "file": file.name,
        "format": "ONNX" if to == "onnx" else "torch.export",
        "model": source.model.name,
        "learner": learner.name,
        "trained_on": {"data": settings.dataset, "ways": settings.ways, "shots": settings.shots},
        "input": {
            "name": INPUT,
            "shape": ["batch", channels, height, width],
            "dtype": "float32",
            "range": [0, 1],
            "meaning": "prepared pictures, batch × channels × height × width, bytes divided by 255",
        },
        "outputs": [
            {"name": name, "shape": ["batch", *shape], "dtype": "float32", "meaning": OUTPUTS[name]}
            for name, shape in shapes.items()
        ],
        "preparation": {
            **source.preparation.plain(),
            "meaning": f"{KINDS[source.preparation.kind]} The same in Python: "
            "bilevel.data.preparation.Preparation(kind, channels, height, width, clean, invert)(picture).image",
        },
        "classes": None if classifier is None else list(map(str, classifier.classes)),
        "temperature": None if classifier is None else classifier.temperature,
        "steps": classifier.steps if classifier is not None and learner.has_steps else None,
        "batch_norm": mode,
        "batch_norm_meaning": None if mode is None else MEANING[mode],
        "checked": {"pictures": len(images), "tolerance": TOLERANCE, "largest_differences": differences},
        "weights": sum(p.numel() for p in module.parameters()),
        "commit": commit(),
    }


def summary(facts: dict[str, Any]) -> list[str]:
    """The card as a few lines of text."""
    what = "Representation" if facts["classes"] is None else f"Classifier of {len(facts['classes'])} classes"
    lines = [f"{what} of {facts['model']}, {facts['format']}."]
    for direction, part in [("in", facts["input"]), *(("out", output) for output in facts["outputs"])]:
        lines.append(
            f"{direction}: {part['name']}, {'×'.join(map(str, part['shape']))} {part['dtype']}: {part['meaning']}"
        )
    if facts["batch_norm"] is not None:
        lines.append(f"Batch norm: {facts['batch_norm']}, {facts['batch_norm_meaning']}.")
    checked = facts["checked"]
    for runtime, differences in checked["largest_differences"].items():
        worst = max(differences.values())
        lines.append(
            f"Largest difference from this library, run by {runtime} on {checked['pictures']} pictures: {worst:.1e}."
        )
    if facts["format"] == "ONNX" and len(checked["largest_differences"]) == 1:
        lines.append(
            'The ONNX file was not run, because onnxruntime is missing: pip install "bilevel[export]" installs it.'
        )
    return lines
