"""One sweep as several jobs of a launcher of Hydra's (SLURM, Ray): a job for each engine"""
