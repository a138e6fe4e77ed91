from graphkit.models.loader import load as load
from graphkit.models.model import TransformersModel as TransformersModel
from graphkit.models.tokenizer import FolderTokenizer as FolderTokenizer
