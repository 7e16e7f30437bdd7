"""`sentray tune`: search over the settings of a recipe, on Ray Tune.

    settings       the section `search`, and what may stand there
    definition     a search as its file describes it, and the training of every trial
    space          the configurations that it may try: a value for every searched setting
    searchers      where the next configuration comes from: grid, random, tpe; plug-ins add theirs
    inputs         what all trials read, made once
    trial_queue    which trial comes next; trials: what is known of each
    ray_tune       runs the queue on Ray Tune; resources: what a trial takes; population:
                   population-based training
    actor          where a trial (its assignment) trains; nested: with several workers
    phases         the whole search: inputs, trials, confirmations, test sets
    ranking        which trials count, and which configuration is best; weights: what is kept
    progress, report, page: what it tells while it runs, and at the end

A trial is the training of a recipe, so its result is an artifact that every search finds. Stages
and pipeline know nothing of searches.
"""
