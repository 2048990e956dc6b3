"""Section `trainer`: how long, what is logged, what is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.sections.base import OneOrMany, UserPath, section

Frequency = Annotated[int, Field(ge=-1)]
LoggerName = Literal["console", "tensorboard", "wandb", "mlflow"]


@section
class EarlyStopConfig:
    metric: str | None = None
    """Metric of validation (val/loss, for instance) that ends the run once it no longer improves; off if unset."""
    mode: Literal["max", "min"] | None = None
    """Whether a larger or a smaller value is better; unset: what the metric's name says."""
    patience: PositiveInt = 3
    """Validations in a row without an improvement, after which the run ends. The one before training does not count."""
    min_delta: NonNegativeFloat = 0.0
    """An improvement is a change by more than this."""


@section
class ProfileConfig:
    steps: list[PositiveInt] = Field(default_factory=list[int])
    """Steps that are traced by torch's profiler, by number; each becomes a file a rank in <run>/profile, and a table of
    its time by phase and kind of kernel. A traced step is slower."""
    ranks: list[NonNegativeInt] = Field(default_factory=lambda: [0])
    """Ranks whose steps are traced."""


@section
class TrainerConfig:
    total_epochs: PositiveInt = 1
    """Epochs over the training files."""
    total_training_steps: PositiveInt | None = None
    """Training steps of the run, whatever the epochs; derived from total_epochs if unset."""
    critic_warmup: NonNegativeInt = 0
    """Initial steps of a PPO run in which only the critic is updated."""
    target_loss: PositiveFloat | None = None
    """SFT stops once the moving average (decay 0.9) of the training loss is below this."""
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)
    """The end of a run that no longer improves."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if a loss or gradient is not finite: stop the run, or skip the mini-batch and count it. In both cases
    parameters, optimizer and learning-rate schedule stay as they were."""
    max_nonfinite_skips: NonNegativeInt = 10
    """Maximum mini-batches that a run may skip with on_nonfinite skip; one more ends it."""
    max_staleness: NonNegativeInt | None = None
    """Unset: sampling and training take turns in one thread. 0: a producer samples in a thread of its own, from the
    newest weights alone, with the same results. More, samples of older weights, is not offered yet."""
    seed: NonNegativeInt = 0
    """Seed of random weights, data order and sampling."""
    save_freq: Frequency = -1
    """Steps between saves of the model in Hugging Face form; -1 saves at the end only, 0 never. Checkpoints to resume
    from have keys of their own (checkpoint.freq)."""
    save_hf: bool = True
    """Save the model in Hugging Face form, as save_freq says; false leaves checkpoints alone (docs/convert.md)."""
    save_shard_gb: PositiveFloat = 5.0
    """Largest size of a file of a saved model, in GB (1e9 bytes). As many ranks write as there are files."""
    test_freq: Frequency = -1
    """Steps between validations; -1 validates at the end only (SFT: each epoch), 0 never."""
    val_before_train: bool = True
    """Validate before the first step."""
    default_local_dir: UserPath = "runs"
    """Folder of all runs; this one's is default_local_dir/experiment_name."""
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    project_name: str = "megatron_rl"
    """Project name for loggers such as wandb."""
    experiment_name: str = "run"
    """Name of the run and of its folder."""
    overwrite: Literal["refuse", "replace", "number"] = "refuse"
    """If the run's folder holds a run already that is not gone on with: refuse to start; replace that run's files once
    the first step starts; or number the new run (name-2, name-3 ...)."""
    resume_mode: UserPath = "auto"
    """auto goes on from the newest complete checkpoint in the run's folder, if there is one; disable starts afresh; a
    path goes on from that checkpoint, or from the newest one of that run."""
    resume_changes: list[str] = Field(default_factory=list)
    """Keys that may differ from the checkpoint's config although they change what is learned."""
    max_time: str | None = None
    """Save a checkpoint and end (exit code 75) before this much time has passed since the start, in Slurm's forms:
    3:50:00, 1-00:00:00, "90" (minutes). No limit if unset."""
    max_restarts: NonNegativeInt = 0
    """Times that a run whose workers fail may start them again, from the newest checkpoint."""
    restart_wait_s: NonNegativeFloat = 10.0
    """Wait before the first restart, in seconds; it doubles with each restart, up to 300."""
    logger: Annotated[list[LoggerName], OneOrMany] = Field(default_factory=lambda: ["console"])
    """Loggers in addition to metrics.jsonl, which is always written."""
    num_logged_rollouts: NonNegativeInt = 4
    """Sample rollouts written to rollouts.jsonl each step."""

    @property
    def model_freq(self) -> int:
        """Steps between saves of the model, as save_freq; 0 if there are none."""
        return self.save_freq if self.save_hf else 0

    @property
    def run_dir(self) -> str:
        """Folder of this run's files."""
        return f"{self.default_local_dir.rstrip('/')}/{self.experiment_name}"
