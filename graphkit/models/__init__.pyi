from graphkit.models.batches import generate_batch as generate_batch
from graphkit.models.loader import load as load
from graphkit.models.model import TransformersModel as TransformersModel
from graphkit.models.reference import (
    reference_engine as reference_engine,
    reference_model as reference_model,
    reference_target as reference_target,
)
from graphkit.models.shapes import random_model as random_model
from graphkit.models.tokenizer import FolderTokenizer as FolderTokenizer
