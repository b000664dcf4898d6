"""Train and evaluate a causal or masked language model: python train_lm.py configs/NAME.yaml [--argument value ...]"""

import hf_relpos  # noqa: F401  registers the models with the Auto classes
from hf_relpos.training.run import main

if __name__ == "__main__":
    main()
