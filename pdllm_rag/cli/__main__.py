"""`python -m pdllm_rag.cli` is `pdllm`."""

import sys

from pdllm_rag.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
