"""Print the test command of README.md: the block of bash after its mark."""

import re
import sys
from pathlib import Path

found = re.search(r"<!-- command: tests -->\n```bash\n(.*?)\n```\n", Path("README.md").read_text(), re.DOTALL)
print(found[1] if found else sys.exit("README.md has no test command"))
