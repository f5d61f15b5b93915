"""Population based training (Jaderberg et al. 2017, arXiv 1711.09846) with real runs.

Members train side by side; each is a series of ordinary runs that resume from checkpoints. After every interval the
worst members copy the weights and settings of better ones (exploit) and perturb or resample the settings (explore). The
result is a schedule of settings over the course of training, not one fixed value per setting.

    explore.py      the space: which settings may change, and how each type of setting is perturbed and resampled
    exploit.py      selection of parents
    journal.py      the records of a population and the file that stores them; it survives a kill at any byte
    driver.py       trains and scores the members and decides what comes next: `train_population`
    view.py         `Population`: a population as read from its folder

A clone takes over its parent's checkpoint: weights, optimizer moments, position in the data, random state, and the
compressor's state if the method stays the same. State that does not fit an explored setting is reinitialised; the
run's `resume` event and the lineage record this.
"""

from shardscope.tuning.population.driver import train_population
from shardscope.tuning.population.explore import Explorable, Ranges
from shardscope.tuning.population.journal import PopulationError
from shardscope.tuning.population.view import Population

__all__ = ["Explorable", "Population", "PopulationError", "Ranges", "train_population"]
