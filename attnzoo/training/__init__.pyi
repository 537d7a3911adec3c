# The names for training loops of your own; attnzoo/training/__init__.py reads them from here.
from attnzoo.evaluation.quality import EvalBatch as EvalBatch
from attnzoo.evaluation.quality import Quality as Quality
from attnzoo.evaluation.quality import evaluate_rows as evaluate_rows
from attnzoo.evaluation.quality import (
    with_original_continuations as with_original_continuations,
)
from attnzoo.evaluation.rows import Rows as Rows
from attnzoo.training.arguments import RecoveryArguments as RecoveryArguments
from attnzoo.training.data import RowOptions as RowOptions
from attnzoo.training.data import load_rows as load_rows
from attnzoo.training.distil import Predictions as Predictions
from attnzoo.training.distil import distil_loss as distil_loss
from attnzoo.training.distil import divergence as divergence
from attnzoo.training.distil import hidden_loss as hidden_loss
from attnzoo.training.distil import hidden_states as hidden_states
from attnzoo.training.distil import hidden_states_error as hidden_states_error
from attnzoo.training.distil import predictions as predictions
from attnzoo.training.distil import softmax_teacher as softmax_teacher
from attnzoo.training.evaluator import rows_to_eval_batch as rows_to_eval_batch
from attnzoo.training.trainer import LogitDistillationTrainer as LogitDistillationTrainer
from attnzoo.training.trainer import TransferTrainer as TransferTrainer
from attnzoo.training.transfer import Transfer as Transfer
from attnzoo.training.transfer import extras as extras
from attnzoo.training.transfer import output_extras as output_extras
from attnzoo.training.transfer import relative_error as relative_error
from attnzoo.training.transfer import swapped_layers as swapped_layers
from attnzoo.training.transfer import weights_divergence as weights_divergence
