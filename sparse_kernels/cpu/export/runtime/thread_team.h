/* Threads that one call at a time shares its work with. They spin for a moment after work, then sleep. */
#ifndef LATBENCH_THREAD_TEAM_H
#define LATBENCH_THREAD_TEAM_H

#include <stdint.h>

typedef void (*team_part)(void *job, int64_t part);
typedef struct thread_team thread_team;

/* A team without threads; NULL where memory is short. */
thread_team *new_team(void);

/* Call function(job, part) for all parts, shared by `members` threads, this one among them. Threads that the system
 * refuses leave their parts to the others. */
void run_team(thread_team *team, int members, team_part function, void *job, int64_t parts);

/* End the threads of a team, and free it. In a forked process it has no threads, and only memory is freed. */
void end_team(thread_team *team);

/* Whether the threads of this team live in this process. */
int is_own_team(const thread_team *team);

#endif
