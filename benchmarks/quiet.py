"""To be imported before torch: drops the warning that torch prints where NumPy is missing, as nothing here needs NumPy."""

import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
