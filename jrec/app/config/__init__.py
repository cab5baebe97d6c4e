"""The configuration of a training run: one module per section, and how TOML and overrides are read."""

from jrec.app.config.model import FeatureOverride as FeatureOverride
from jrec.app.config.model import ModelConfig as ModelConfig
from jrec.app.config.model import MultiTaskSection as MultiTaskSection
from jrec.app.config.optimizer import EmbeddingOptimizerConfig as EmbeddingOptimizerConfig
from jrec.app.config.optimizer import LRScheduleConfig as LRScheduleConfig
from jrec.app.config.optimizer import OptimizerConfig as OptimizerConfig
from jrec.app.config.reading import differences as differences
from jrec.app.config.reading import key_help as key_help
from jrec.app.config.reading import load_config as load_config
from jrec.app.config.reading import save_config as save_config
from jrec.app.config.reading import shipped_configs as shipped_configs
from jrec.app.config.tables import TableOverride as TableOverride
from jrec.app.config.tables import TablesConfig as TablesConfig
from jrec.app.config.tables import TTCacheSection as TTCacheSection
from jrec.app.config.tables import TTSection as TTSection
from jrec.app.config.train import CheckpointConfig as CheckpointConfig
from jrec.app.config.train import DataConfig as DataConfig
from jrec.app.config.train import EarlyStoppingSection as EarlyStoppingSection
from jrec.app.config.train import EvaluateConfig as EvaluateConfig
from jrec.app.config.train import FAEConfig as FAEConfig
from jrec.app.config.train import LogConfig as LogConfig
from jrec.app.config.train import MeshConfig as MeshConfig
from jrec.app.config.train import TrainConfig as TrainConfig
