"""How good answers and retrieval are, measured over a file of questions."""

from pdllm_rag.evaluation.metrics import Estimate, Grade, grade
from pdllm_rag.evaluation.qa import Outcome, Question, ask_all, read_questions, summary

__all__ = ["Estimate", "Grade", "Outcome", "Question", "ask_all", "grade", "read_questions", "summary"]
