"""The configuration of a training run: one module per section, and how TOML and overrides are read."""

from jrec.train.config.model import OWN_MODEL_KEYS as OWN_MODEL_KEYS
from jrec.train.config.model import SEQUENCE_KEYS as SEQUENCE_KEYS
from jrec.train.config.model import FeatureOverride as FeatureOverride
from jrec.train.config.model import ModelConfig as ModelConfig
from jrec.train.config.model import MultiTaskSection as MultiTaskSection
from jrec.train.config.model import SequenceSection as SequenceSection
from jrec.train.config.optimizer import EmbeddingOptimizerConfig as EmbeddingOptimizerConfig
from jrec.train.config.optimizer import LRScheduleConfig as LRScheduleConfig
from jrec.train.config.optimizer import OptimizerConfig as OptimizerConfig
from jrec.train.config.reading import differences as differences
from jrec.train.config.reading import key_help as key_help
from jrec.train.config.reading import load_config as load_config
from jrec.train.config.reading import save_config as save_config
from jrec.train.config.reading import shipped_configs as shipped_configs
from jrec.train.config.tables import TableOverride as TableOverride
from jrec.train.config.tables import TablesConfig as TablesConfig
from jrec.train.config.tables import TTCacheSection as TTCacheSection
from jrec.train.config.tables import TTSection as TTSection
from jrec.train.config.train import CheckpointConfig as CheckpointConfig
from jrec.train.config.train import DataConfig as DataConfig
from jrec.train.config.train import EarlyStoppingSection as EarlyStoppingSection
from jrec.train.config.train import EvaluateConfig as EvaluateConfig
from jrec.train.config.train import FAEConfig as FAEConfig
from jrec.train.config.train import LogConfig as LogConfig
from jrec.train.config.train import MeshConfig as MeshConfig
from jrec.train.config.train import TrainConfig as TrainConfig
